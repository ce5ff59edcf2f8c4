// All layers of a decoding forward on a CPU, in fp32, of models with Llama's, Qwen2's or Qwen3's layers.
// The products are oneDNN's, through PyTorch's C interface. rows.py compiles this file behind
// attention.cpp, whose functions it uses.

#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>

#include <stdexcept>

struct Product {  // of layers with one input; the weight in oneDNN's layout
  AtenTensorHandle weight, bias;  // no bias: null
};

struct Block {  // a layer of the model
  Product qkv, o, gate_up, down;
  const float *before_attention, *before_mlp;  // RMSNorm's weights [width]
  const float *q_norm, *k_norm;                // of each head, [dim]; without them null
};

struct Model {
  const Block *blocks;
  const float *last_norm;  // [width]
  int64_t count, width, inner, heads, kv_heads, dim;
  float eps, scale;
};

struct Rows {  // of one forward
  float *hidden;             // [rows, width], the embeddings, then what the layers make of them
  const float *rotary;       // [positions, 2, dim], cosines and sines
  const int64_t *positions;  // [rows]
  const int64_t *places;     // [rows], the slots that keys and values are written to
  const int32_t *spans;      // [rows, ranges, 2]
  float *const *caches;      // keys and values [kv_heads, slots, dim] of each layer in turn
  int64_t rows, ranges, slots, threads;
  int64_t multiplied;  // rows of the products, at least `rows`
};

static void check(AOTITorchError failed) {
  if (failed) throw std::runtime_error("PyTorch failed");
}

// A tensor of PyTorch's.
struct Held {
  AtenTensorHandle handle = nullptr;
  // [multiplied, columns] of a forward: uninitialised, but zero behind its rows.
  Held(const Rows &r, int64_t columns) {
    const int64_t sizes[] = {r.multiplied, columns}, strides[] = {columns, 1};
    check(aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(),
                                   aoti_torch_device_type_cpu(), 0, &handle));
    std::fill(data() + r.rows * columns, data() + r.multiplied * columns, 0.0f);
  }
  // x @ weight + bias
  Held(const Held &x, const Product &product) {
    AtenTensorHandle bias = product.bias;
    check(aoti_torch_cpu__linear_pointwise(x.handle, product.weight, bias ? &bias : nullptr, "none",
                                           nullptr, 0, nullptr, &handle));
  }
  Held(Held &&other) noexcept : handle(other.handle) { other.handle = nullptr; }
  ~Held() {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }
  float *data() const {
    void *at = nullptr;
    check(aoti_torch_get_data_ptr(handle, &at));
    return static_cast<float *>(at);
  }
};

// Call f(row) for every row: on all threads, or on this one where there is too little to do.
template <class F>
static void each_row(const Rows &r, int64_t work, F f) {
  const bool parallel = r.threads > 1 && r.rows > 1 && r.rows * work > (1 << 14);
#pragma omp parallel for schedule(static) num_threads(int(r.threads)) if (parallel)
  for (int64_t row = 0; row < r.rows; row++) f(row);
}

// RMSNorm of `width` values, where `to` may be `x`.
static void normalise(const float *x, const float *weight, int64_t width, float eps, float *to) {
  const int64_t whole = width / WIDTH * WIDTH;
  Vector parts[4] = {};
  for (int64_t i = 0; i < whole; i += WIDTH) {
    const Vector part = load(x + i);
    parts[i / WIDTH % 4] += part * part;
  }
  float squares = sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (int64_t i = whole; i < width; i++) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / float(width) + eps);
  for (int64_t i = 0; i < whole; i += WIDTH) store(to + i, load(weight + i) * (load(x + i) * factor));
  for (int64_t i = whole; i < width; i++) to[i] = weight[i] * (x[i] * factor);
}

// to = silu(gate) * up: x / (1 + e^-x) by e^-|x|, which cannot overflow.
static Vector gated(Vector gate, Vector up) {
  const Vector power = exponential(gate < Vector{} ? gate : -gate);
  return gate * (gate < Vector{} ? power : fill(1.0f)) / (power + 1.0f) * up;
}

static void gate(const float *gates, const float *ups, int64_t width, float *to) {
  const int64_t whole = width / WIDTH * WIDTH, rest = width - whole;
  for (int64_t i = 0; i < whole; i += WIDTH) store(to + i, gated(load(gates + i), load(ups + i)));
  if (rest) {
    float a[WIDTH] = {}, b[WIDTH] = {};
    std::copy_n(gates + whole, rest, a);
    std::copy_n(ups + whole, rest, b);
    store(a, gated(load(a), load(b)));
    std::copy_n(a, rest, to + whole);
  }
}

// RoPE of one head in place: its halves as the two parts of complex numbers.
static void rotate(float *x, const float *cosines, const float *sines, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

// The part of a layer before its attention: norm, projections, RoPE. Fills
// queries, keys and values [rows, (heads + 2 kv_heads) dim].
static Held project(const Model &m, const Rows &r, const Block &block) {
  const Held normed(r, m.width);
  float *to = normed.data();
  each_row(r, m.width, [&](int64_t row) {
    normalise(r.hidden + row * m.width, block.before_attention, m.width, m.eps, to + row * m.width);
  });
  Held qkv(normed, block.qkv);
  float *data = qkv.data();
  const int64_t turned = m.heads + m.kv_heads, columns = (turned + m.kv_heads) * m.dim;
  each_row(r, turned * m.dim, [&](int64_t row) {
    const float *cosines = r.rotary + r.positions[row] * 2 * m.dim;
    for (int64_t head = 0; head < turned; head++) {
      float *x = data + row * columns + head * m.dim;
      const float *norm = head < m.heads ? block.q_norm : block.k_norm;
      if (norm) normalise(x, norm, m.dim, m.eps, x);
      rotate(x, cosines, cosines + m.dim, m.dim);
    }
  });
  return qkv;
}

// The part of a layer behind its attention [rows, heads dim]; `hidden` is then its output.
static void complete(const Model &m, const Rows &r, const Block &block, const Held &attended) {
  const Held out(attended, block.o), normed(r, m.width);
  const float *from = out.data();
  float *to = normed.data();
  each_row(r, m.width, [&](int64_t row) {
    float *x = r.hidden + row * m.width;
    for (int64_t i = 0; i < m.width; i++) x[i] += from[row * m.width + i];
    normalise(x, block.before_mlp, m.width, m.eps, to + row * m.width);
  });
  const Held both(normed, block.gate_up), inner(r, m.inner);
  const float *gates = both.data();
  float *gated = inner.data();
  each_row(r, 2 * m.inner, [&](int64_t row) {
    const float *x = gates + row * 2 * m.inner;
    gate(x, x + m.inner, m.inner, gated + row * m.inner);
  });
  const Held last(inner, block.down);
  const float *added = last.data();
  each_row(r, m.width, [&](int64_t row) {
    for (int64_t i = row * m.width; i < (row + 1) * m.width; i++) r.hidden[i] += added[i];
  });
}

// 0, or 1 where PyTorch failed, which it has then printed.
template <class F>
static int answer(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception &) {
    return 1;
  }
}

// The norm behind the last layer, in place.
extern "C" void normalise_last(const Model *m, const Rows *r) {
  each_row(*r, m->width, [&](int64_t row) {
    float *x = r->hidden + row * m->width;
    normalise(x, m->last_norm, m->width, m->eps, x);
  });
}

// The whole forward: `hidden` becomes the last hidden states.
extern "C" int forward(const Model *m, const Rows *r) {
  return answer([&] {
    const int64_t columns = (m->heads + 2 * m->kv_heads) * m->dim;
    for (int64_t layer = 0; layer < m->count; layer++) {
      const Held qkv = project(*m, *r, m->blocks[layer]), attended(*r, m->heads * m->dim);
      const float *q = qkv.data(), *key = q + m->heads * m->dim, *value = key + m->kv_heads * m->dim;
      const Layer part{q, key, value, m->dim, columns, m->dim, columns, m->dim, columns, r->places,
                       r->caches[2 * layer], r->caches[2 * layer + 1], r->spans, attended.data(),
                       r->rows, m->heads, m->kv_heads, r->slots, m->dim, r->ranges, r->threads,
                       m->scale};
      if (write_and_attend(&part)) throw std::runtime_error("no such head dimension");
      complete(*m, *r, m->blocks[layer], attended);
    }
    normalise_last(m, r);
  });
}

// A layer around an attention that is computed elsewhere: first `project`,
extern "C" int before_attention(const Model *m, const Rows *r, int64_t layer, float *to) {
  return answer([&] {
    const Held qkv = project(*m, *r, m->blocks[layer]);
    std::copy_n(qkv.data(), r->rows * (m->heads + 2 * m->kv_heads) * m->dim, to);
  });
}

// then `complete`, of `attended` [rows, heads, dim].
extern "C" int after_attention(const Model *m, const Rows *r, int64_t layer, const float *attended) {
  return answer([&] {
    const Held x(*r, m->heads * m->dim);
    std::copy_n(attended, r->rows * m->heads * m->dim, x.data());
    complete(*m, *r, m->blocks[layer], x);
  });
}

extern "C" void delete_handle(void *tensor) {
  aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(tensor));
}
