// A decoding forward on a CPU, from token ids to logits, of models with Llama's, Qwen2's or Qwen3's
// layers: one parallel region, with barriers between the products and what lies between them. __init__.py
// compiles this file behind vectors.cpp, products.cpp and attention.cpp.
//
// W is what weights and cache are in, float or Bf16. The hidden states are in fp32 throughout.

// What an adapter adds to the outputs of some rows: B (A x). Without one a.weight is null.
struct Adapter {
  Product a;
  const void *b;          // [blocks of outputs, rank, 16]
  const int64_t *starts;  // of each block the first of the `rank` results of A that it takes
  int64_t rank;
};

struct Block {  // a layer of the model
  Product qkv, o, gate_up, down;  // gate_up: a block of 16 gates, the block of their ups, and so on
  const float *before_attention, *before_mlp;  // RMSNorm's weights [width]
  const float *q_norm, *k_norm;                // of each head, [dim]; without them null
  Adapter to_qkv, to_o, to_gate_up, to_down;
};

struct Model {
  const Block *blocks;
  const void *embeddings;  // [vocabulary, width], or null: they are the head's weights
  Product head;
  const float *last_norm;  // [width]
  int64_t count, width, inner, heads, kv_heads, dim, bf16;
  float eps, scale;
};

struct Rows {  // of one forward
  const int64_t *tokens, *positions;  // [rows]
  const int64_t *places;     // [rows], the slots that keys and values are written to
  const int32_t *spans;      // [rows, ranges, 2]
  const int64_t *read;       // [reads], the rows whose logits are wanted
  const float *rotary;       // [positions, 2, dim], cosines and sines
  void *const *caches;       // keys and values [kv_heads, slots, dim] of each layer in turn
  float *logits;             // [reads, vocabulary]
  int64_t rows, ranges, reads, slots, threads;
  int64_t plain;  // rows from here on are the adapter's
};

// RMSNorm of `width` values; zeros behind them, up to `end`.
template <class T>
static void normalise(const float *x, const float *weight, int64_t width, int64_t end, float eps, T *to) {
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
  for (int64_t i = whole; i < end; i += WIDTH) {
    float rest[WIDTH] = {};
    for (int64_t j = i; j < std::min(width, i + WIDTH); j++) rest[j - i] = weight[j] * (x[j] * factor);
    store(to + i, load(rest));
  }
}

// silu(gate) * up: x / (1 + e^-x) by e^-|x|, which cannot overflow.
static Vector gated(Vector gate, Vector up) {
  const Vector power = exponential(gate < Vector{} ? gate : -gate);
  return gate * (gate < Vector{} ? power : fill(1.0f)) / (power + 1.0f) * up;
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

template <class T>
static void copy(const float *from, int64_t count, T *to) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
  if (i == count) return;
  float rest[WIDTH] = {};
  std::copy(from + i, from + count, rest);
  T rounded[WIDTH];
  store(rounded, load(rest));
  std::copy_n(rounded, count - i, to + i);
}

// The outputs of a block that there are, with their bias: [at, at + count) of `to` plus or in place
// of what is there.
template <bool ADDED>
static inline void put(const Product &p, int64_t block, Sixteen found, float *to) {
  const int64_t at = block * LANES, count = std::min<int64_t>(LANES, p.outputs - at);
  if (p.bias)
    for (int64_t i = 0; i < count; i++) found[i] += p.bias[at + i];
  if (count == LANES) {
    SixteenInMemory *there = reinterpret_cast<SixteenInMemory *>(to + at);
    *there = ADDED ? *there + found : found;
    return;
  }
  for (int64_t i = 0; i < count; i++) to[at + i] = ADDED ? to[at + i] + found[i] : found[i];
}

// Room for rows of a product's inputs, and for the rows that tiles read behind them.
template <class W>
struct Fed : Buffer<Input<W>> {
  Fed(int64_t rows, int64_t width) : Buffer<Input<W>>((rows + std::max(TILE_ROWS - 1, 0)) * width) {}
};

// What a block of an adapter's outputs adds to a row. low: A x of this row.
template <class W>
static inline Sixteen low_rank(const Adapter &adapter, int64_t block, const float *low) {
  const W *weights = static_cast<const W *>(adapter.b) + block * adapter.rank * LANES;
  low += adapter.starts[block];
  Wide sums[PARTS] = {};
  for (int64_t i = 0; i < adapter.rank; i++) {
    UNROLLED for (int p = 0; p < PARTS; p++) sums[p] += widened(weights + i * LANES + p * EACH) * low[i];
  }
  return get<Sixteen>(sums);
}

// The product of all rows, to which an adapter adds B (A x) from row `plain` on. Every thread computes
// A x for itself, which is little, and of B (A x) what its own outputs need.
template <class W, class F>
static void product(const Thread &t, const Product &p, const Adapter &adapter, int64_t plain, int64_t joined,
                    const Input<W> *x, int64_t rows, F f) {
  if (plain == rows || !adapter.a.weight) return product<W>(t, p, joined, x, rows, f);
  const int64_t rank = adapter.a.outputs;
  const Buffer<float> low((rows - plain) * rank);
  product<W>(Thread{}, adapter.a, 1, x + plain * p.inputs, rows - plain,
             [&](int64_t row, int64_t block, const Sixteen *out) { put<false>(adapter.a, block, out[0], low.data() + row * rank); });
  product<W>(t, p, joined, x, rows, [&](int64_t row, int64_t block, Sixteen *out) {
    for (int64_t b = 0; b < joined && row >= plain; b++)
      out[b] += low_rank<W>(adapter, block + b, low.data() + (row - plain) * rank);
    f(row, block, out);
  });
}

template <class W>
static void embed(const Model &m, int64_t token, float *to) {
  constexpr int64_t PAIR = 4 / sizeof(W);
  const W *row = static_cast<const W *>(m.embeddings) + token * m.width;
  const W *block = static_cast<const W *>(m.head.weight) + token / LANES * LANES * m.head.inputs;
  for (int64_t i = 0; i < m.width; i++)
    to[i] = number(m.embeddings ? row[i] : block[(i / PAIR * LANES + token % LANES) * PAIR + i % PAIR]);
}

template <class W>
static void compute(const Model &m, const Rows &r, AttendAll<W> attend) {
  const int64_t dim = m.dim, rows = r.rows, turned = m.heads + m.kv_heads, columns = (turned + m.kv_heads) * dim;
  const int64_t width = round_up(m.width, STEP), outer = round_up(m.heads * dim, STEP), inner = round_up(m.inner, STEP);
  const int64_t group = m.heads / m.kv_heads;
  int64_t most = 0;  // slots that a row sees
  for (int64_t row = 0; row < rows; row++) {
    int64_t seen = 0;
    for (int64_t s = 0; s < r.ranges; s++) {
      const int32_t *span = r.spans + 2 * (row * r.ranges + s);
      seen += std::max(0, span[1] - span[0]);
    }
    most = std::max(most, seen);
  }
  const int64_t room = most + ROOM_KEYS;
  const int64_t most_rows = std::max<int64_t>(1, (std::is_same_v<W, Bf16> && TILED ? 16 : MOST_QUERIES) / group);
  const Buffer<float> states(rows * m.width), joined(rows * columns);
  const Fed<W> normed(std::max(rows, r.reads), width), attended(rows, outer), middle(rows, inner);
  float *hidden = states.data(), *qkv = joined.data();
  Input<W> *x = normed.data(), *out = attended.data(), *mlp = middle.data();

  on_threads(int(r.threads), [&](const Thread &t) {
    [[maybe_unused]] const Tiles tiles;
    const Buffer<float> weights(ROOM_QUERIES * room), found(most_rows * group * dim);
    const Buffer<Query> queries(most_rows * group + MOST_QUERIES);
    const Part own = t.part(rows);
    for (int64_t row = own.begin; row < own.end; row++) {
      embed<W>(m, r.tokens[row], hidden + row * m.width);
      std::memset(out + row * outer, 0, outer * sizeof(Input<W>));
      std::memset(mlp + row * inner, 0, inner * sizeof(Input<W>));
    }
    for (int64_t layer = 0; layer < m.count; layer++) {
      const Block &b = m.blocks[layer];
      W *keys = static_cast<W *>(r.caches[2 * layer]), *values = static_cast<W *>(r.caches[2 * layer + 1]);
      for (int64_t row = own.begin; row < own.end; row++)
        normalise(hidden + row * m.width, b.before_attention, m.width, width, m.eps, x + row * width);
      wait(t);
      product<W>(t, b.qkv, b.to_qkv, r.plain, 1, x, rows, [&](int64_t row, int64_t block, const Sixteen *found) {
        put<false>(b.qkv, block, found[0], qkv + row * columns);
      });
      wait(t);
      for (int64_t row = own.begin; row < own.end; row++) {
        const float *cosines = r.rotary + r.positions[row] * 2 * dim;
        for (int64_t head = 0; head < turned; head++) {
          float *at = qkv + row * columns + head * dim;
          const float *norm = head < m.heads ? b.q_norm : b.k_norm;
          if (norm) normalise(at, norm, dim, dim, m.eps, at);
          rotate(at, cosines, cosines + dim, dim);
        }
        for (int64_t head = 0; head < m.kv_heads; head++) {
          const float *key = qkv + row * columns + (m.heads + head) * dim;
          const int64_t place = (head * r.slots + r.places[row]) * dim;
          copy(key, dim, keys + place);
          copy(key + m.kv_heads * dim, dim, values + place);
        }
      }
      wait(t);
      // In turns: of a prompt's rows each sees more than the one before.
      for (int64_t row = 0, i = 0, count, last; row < rows; row += count) {
        count = alike(r.spans, r.ranges, row, rows, most_rows, last);
        for (int64_t head = 0; head < m.kv_heads; head++) {
          if (i++ % t.threads != t.number) continue;
          const int64_t place = head * r.slots * dim, at = head * group * dim;
          for (int64_t n = 0; n < count * group; n++) {
            const int64_t of = row + n / group;
            queries.data()[n] = {qkv + of * columns + at + n % group * dim, found.data() + n * dim,
                                 last ? r.spans[2 * (of * r.ranges + last) - 1] : 0};
          }
          attend(queries.data(), count * group, keys + place, values + place,
                 r.spans + 2 * (row + count - 1) * r.ranges, last, m.scale, weights.data(), room);
          for (int64_t n = 0; n < count; n++)
            copy(found.data() + n * group * dim, group * dim, out + (row + n) * outer + at);
        }
      }
      wait(t);
      product<W>(t, b.o, b.to_o, r.plain, 1, out, rows, [&](int64_t row, int64_t block, const Sixteen *found) {
        put<true>(b.o, block, found[0], hidden + row * m.width);
      });
      wait(t);
      for (int64_t row = own.begin; row < own.end; row++)
        normalise(hidden + row * m.width, b.before_mlp, m.width, width, m.eps, x + row * width);
      wait(t);
      product<W>(t, b.gate_up, b.to_gate_up, r.plain, 2, x, rows, [&](int64_t row, int64_t block, const Sixteen *found) {
        float gates[LANES], ups[LANES];
        std::memcpy(gates, &found[0], sizeof(gates));
        std::memcpy(ups, &found[1], sizeof(ups));
        if (b.gate_up.bias) {
          const float *bias = b.gate_up.bias + block * LANES;
          for (int i = 0; i < LANES; i++) gates[i] += bias[i], ups[i] += bias[LANES + i];
        }
        for (int i = 0; i < LANES; i += WIDTH)
          store(mlp + row * inner + block / 2 * LANES + i, gated(load(gates + i), load(ups + i)));
      });
      wait(t);
      product<W>(t, b.down, b.to_down, r.plain, 1, mlp, rows, [&](int64_t row, int64_t block, const Sixteen *found) {
        put<true>(b.down, block, found[0], hidden + row * m.width);
      });
      wait(t);
    }
    const Part reading = t.part(r.reads);
    for (int64_t i = reading.begin; i < reading.end; i++)
      normalise(hidden + r.read[i] * m.width, m.last_norm, m.width, width, m.eps, x + i * width);
    wait(t);
    product<W>(t, m.head, 1, x, r.reads, [&](int64_t row, int64_t block, const Sixteen *found) {
      put<false>(m.head, block, found[0], r.logits + row * m.head.outputs);
    });
  });
}

template <class W>
static int in_dim(const Model &m, const Rows &r) {
  switch (m.dim) {
    case 8: compute<W>(m, r, attend_all<8, W>); return 0;
    case 16: compute<W>(m, r, attend_all<16, W>); return 0;
    case 32: compute<W>(m, r, attend_all<32, W>); return 0;
    case 64: compute<W>(m, r, attend_all<64, W>); return 0;
    case 80: compute<W>(m, r, attend_all<80, W>); return 0;
    case 96: compute<W>(m, r, attend_all<96, W>); return 0;
    case 128: compute<W>(m, r, attend_all<128, W>); return 0;
  }
  return 1;
}

// The whole forward; 1 for a head dimension that there is no code for.
extern "C" int forward(const Model *m, const Rows *r) {
  return m->bf16 ? in_dim<Bf16>(*m, *r) : in_dim<float>(*m, *r);
}

// 1 where bf16 is multiplied in tiles.
extern "C" int tiled() { return TILED; }
