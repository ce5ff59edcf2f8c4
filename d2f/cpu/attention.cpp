// A layer's attention in a decoding forward on a CPU, in fp32: write new keys and values to their slots,
// then attend with flat rows over spans of the slots.
//
// Each row is computed alone, so its result does not depend on the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define UNROLLED _Pragma("GCC unroll 16")  // so that arrays of vectors stay in registers
constexpr int WIDTH = 8;
typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef float InMemory __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline Vector load(const float *at) { return *reinterpret_cast<const InMemory *>(at); }

static inline void store(float *at, Vector x) { *reinterpret_cast<InMemory *>(at) = x; }

static inline Vector fill(float value) { return value - Vector{}; }

static inline float sum(Vector x) {
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

// e^x of x <= 0 to about one unit in the last place: 2^n e^r with |r| <= ln 2 / 2, e^r by its
// Taylor series. Below -87 it is 0.
static inline Vector exponential(Vector x) {
  const Vector limited = x < fill(-87.0f) ? fill(-87.0f) : x;
  const Vector magic = fill(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded
  const Vector n = (limited * 1.44269504f + magic) - magic;
  const Vector r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Vector p = fill(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Bits exponent = (__builtin_convertvector(n, Bits) + 127) << 23;
  Vector power;
  std::memcpy(&power, &exponent, sizeof(power));
  return x < fill(-87.0f) ? Vector{} : p * power;
}

// One row and head: q [DIM], the keys and values of its head [S, DIM], spans [count, 2] of slots.
// weights: room for all slots that the row sees, and WIDTH more.
template <int DIM>
static void attend_row(const float *q, const float *keys, const float *values, const int32_t *spans,
                       int64_t count, float scale, float *weights, float *out) {
  constexpr int PARTS = DIM / WIDTH;
  Vector x[PARTS];
  UNROLLED for (int i = 0; i < PARTS; i++) x[i] = load(q + WIDTH * i) * scale;
  int64_t seen = 0;
  float most = -INFINITY;
  for (int64_t s = 0; s < count; s++) {
    for (int64_t slot = spans[2 * s]; slot < spans[2 * s + 1]; slot++) {
      const float *key = keys + slot * DIM;
      Vector parts[2] = {};  // two, which do not wait for each other
      UNROLLED for (int i = 0; i < PARTS; i++) parts[i % 2] += x[i] * load(key + WIDTH * i);
      weights[seen] = sum(parts[0] + parts[1]);
      most = std::max(most, weights[seen++]);
    }
  }
  for (int i = 0; i < WIDTH; i++) weights[seen + i] = -INFINITY;  // weigh nothing
  Vector total = {};
  for (int64_t j = 0; j < seen; j += WIDTH) {
    const Vector weight = exponential(load(weights + j) - most);
    total += weight;
    store(weights + j, weight);
  }
  Vector mean[PARTS] = {};
  const float *weight = weights;
  for (int64_t s = 0; s < count; s++) {
    for (int64_t slot = spans[2 * s]; slot < spans[2 * s + 1]; slot++) {
      const float *value = values + slot * DIM;
      const Vector w = fill(*weight++);
      UNROLLED for (int i = 0; i < PARTS; i++) mean[i] += w * load(value + WIDTH * i);
    }
  }
  const float share = seen ? 1.0f / sum(total) : 0.0f;  // a row that sees nothing gives 0
  UNROLLED for (int i = 0; i < PARTS; i++) store(out + WIDTH * i, mean[i] * share);
}

// q [heads, rows, DIM] of strides q_head, q_row; out [rows, heads, DIM].
template <int DIM>
static void attend(const float *q, int64_t q_head, int64_t q_row, const float *keys,
                   const float *values, int64_t slots, const int32_t *spans, int64_t count,
                   float *out, int64_t rows, int64_t heads, int64_t group, float scale,
                   int threads) {
  int64_t most = 0, all = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t seen = 0;
    for (int64_t s = 0; s < count; s++) {
      const int32_t *span = spans + 2 * (row * count + s);
      seen += std::max(0, span[1] - span[0]);
    }
    most = std::max(most, seen);
    all += seen;
  }
  // All threads or none: OpenMP ends and starts threads where regions of other numbers alternate.
  const int64_t enough = 1 << 15;  // multiplications that are worth waking them
#pragma omp parallel num_threads(threads) if (all * heads * DIM > enough)
  {
    std::vector<float> weights(most + WIDTH);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * heads; i++) {
      const int64_t row = i / heads, head = i % heads, place = head / group * slots * DIM;
      attend_row<DIM>(q + head * q_head + row * q_row, keys + place, values + place,
                      spans + 2 * row * count, count, scale, weights.data(), out + i * DIM);
    }
  }
}

static void write(const float *from, int64_t head_stride, int64_t row_stride, const int64_t *places,
                  float *to, int64_t rows, int64_t kv_heads, int64_t slots, int64_t dim) {
  for (int64_t head = 0; head < kv_heads; head++)
    for (int64_t row = 0; row < rows; row++)
      std::memcpy(to + (head * slots + places[row]) * dim,
                  from + head * head_stride + row * row_stride, dim * sizeof(float));
}

struct Layer {
  const float *q, *key, *value;  // [heads or kv_heads, rows, dim], the last stride 1
  int64_t q_head, q_row, key_head, key_row, value_head, value_row;  // strides
  const int64_t *places;         // [rows], the slots that key and value are written to
  float *keys, *values;          // [kv_heads, slots, dim]
  const int32_t *spans;          // [rows, count, 2]
  float *out;                    // [rows, heads, dim]
  int64_t rows, heads, kv_heads, slots, dim, count, threads;
  float scale;
};

// 0, or 1 where there is no code for the head dimension; then nothing is written.
extern "C" int write_and_attend(const Layer *layer) {
  const Layer &x = *layer;
  auto run = [&](auto attend_in_dim) {
    write(x.key, x.key_head, x.key_row, x.places, x.keys, x.rows, x.kv_heads, x.slots, x.dim);
    write(x.value, x.value_head, x.value_row, x.places, x.values, x.rows, x.kv_heads, x.slots,
          x.dim);
    attend_in_dim(x.q, x.q_head, x.q_row, x.keys, x.values, x.slots, x.spans, x.count, x.out, x.rows,
           x.heads, x.heads / x.kv_heads, x.scale, int(x.threads));
    return 0;
  };
  switch (x.dim) {
    case 8: return run(attend<8>);
    case 16: return run(attend<16>);
    case 32: return run(attend<32>);
    case 64: return run(attend<64>);
    case 80: return run(attend<80>);
    case 96: return run(attend<96>);
    case 128: return run(attend<128>);
  }
  return 1;
}
