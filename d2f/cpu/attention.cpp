// A layer's attention in a decoding forward: flat rows over spans of the slots that its keys and values
// lie in. Each row is computed alone, so its result does not depend on the batch.

constexpr int MOST_HEADS = 4;  // that are computed together: what is loaded of a key or value serves all
constexpr int KEYS = 8;        // whose products are summed together

// A vector of a head: 16 numbers of it where its dimension is a multiple of that, else 8.
template <int DIM>
struct Lanes {
  typedef std::conditional_t<DIM % LANES == 0, Sixteen, Vector> Type;
};

template <class V>
static inline V get(const float *at) {
  V x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

template <class V>
static inline V get(const Bf16 *at) {
  typedef std::conditional_t<sizeof(V) == 64, uint16_t __attribute__((vector_size(32))), Halves> Half;
  typedef std::conditional_t<sizeof(V) == 64, SixteenBits, Bits> Whole;
  Half halves;
  std::memcpy(&halves, at, sizeof(halves));
  const Whole bits = __builtin_convertvector(halves, Whole) << 16;
  V x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

static inline Vector fold(Vector x) { return x; }

static inline Vector fold(Sixteen x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}

// The sums of neighbours, first those of a, then those of b.
static inline Vector pairs(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}

// Attend with a row's heads [HEADS][DIM] that share the keys and values [slots][DIM], over spans
// [count][2]. weights: [HEADS][room], room for all slots that the row sees and 2 KEYS more.
template <int DIM, int HEADS, class W>
static void attend_heads(const float *q, const W *keys, const W *values, const int32_t *spans, int64_t count,
                         float scale, float *weights, int64_t room, float *out) {
  typedef typename Lanes<DIM>::Type V;
  constexpr int EACH = sizeof(V) / 4, PARTS = DIM / EACH;
  V x[HEADS][PARTS];
  UNROLLED for (int h = 0; h < HEADS; h++) {
    UNROLLED for (int i = 0; i < PARTS; i++) x[h][i] = get<V>(q + h * DIM + EACH * i) * scale;
  }
  int64_t seen = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t stop = spans[2 * s + 1];
    for (int64_t slot = spans[2 * s]; slot < stop; slot += KEYS) {
      const int64_t there = std::min<int64_t>(KEYS, stop - slot);
      Vector products[HEADS][KEYS];
      UNROLLED for (int k = 0; k < KEYS; k++) {
        const W *key = keys + (slot + std::min<int64_t>(k, there - 1)) * DIM;  // the last one again
        V sums[HEADS] = {};
        UNROLLED for (int i = 0; i < PARTS; i++) {
          const V part = get<V>(key + EACH * i);
          UNROLLED for (int h = 0; h < HEADS; h++) sums[h] += x[h][i] * part;
        }
        UNROLLED for (int h = 0; h < HEADS; h++) products[h][k] = fold(sums[h]);
      }
      UNROLLED for (int h = 0; h < HEADS; h++) {
        const Vector *p = products[h];
        const Vector half = pairs(pairs(p[0], p[1]), pairs(p[2], p[3]));
        store(weights + h * room + seen, pairs(half, pairs(pairs(p[4], p[5]), pairs(p[6], p[7]))));
      }
      seen += there;
    }
  }
  V mean[HEADS][PARTS] = {};
  float share[HEADS];
  for (int h = 0; h < HEADS; h++) {
    float *weight = weights + h * room, most = -INFINITY;
    for (int i = 0; i < KEYS; i++) weight[seen + i] = -INFINITY;  // weigh nothing
    Vector greatest = fill(-INFINITY);
    for (int64_t j = 0; j < seen; j += WIDTH) {
      const Vector score = load(weight + j);
      greatest = score > greatest ? score : greatest;
    }
    for (int i = 0; i < WIDTH; i++) most = std::max(most, greatest[i]);
    Vector total = {};
    for (int64_t j = 0; j < seen; j += WIDTH) {
      const Vector power = exponential(load(weight + j) - most);
      total += power;
      store(weight + j, power);
    }
    share[h] = seen ? 1.0f / sum(total) : 0.0f;  // a row that sees nothing gives 0
  }
  const float *weight = weights;
  for (int64_t s = 0; s < count; s++) {
    for (int64_t slot = spans[2 * s]; slot < spans[2 * s + 1]; slot++, weight++) {
      UNROLLED for (int i = 0; i < PARTS; i++) {
        const V part = get<V>(values + slot * DIM + EACH * i);
        UNROLLED for (int h = 0; h < HEADS; h++) mean[h][i] += part * weight[h * room];
      }
    }
  }
  UNROLLED for (int h = 0; h < HEADS; h++) {
    UNROLLED for (int i = 0; i < PARTS; i++) {
      const V part = mean[h][i] * share[h];
      std::memcpy(out + h * DIM + EACH * i, &part, sizeof(part));
    }
  }
}

// The same for any number of heads.
template <int DIM, class W>
static void attend_row(const float *q, int64_t heads, const W *keys, const W *values, const int32_t *spans,
                       int64_t count, float scale, float *weights, int64_t room, float *out) {
  constexpr int TOGETHER = DIM > 64 ? MOST_HEADS / 2 : MOST_HEADS;  // their sums stay in registers
  while (heads) {
    const int64_t now = std::min<int64_t>(heads, TOGETHER);
    switch (now) {
      case 1: attend_heads<DIM, 1>(q, keys, values, spans, count, scale, weights, room, out); break;
      case 2: attend_heads<DIM, 2>(q, keys, values, spans, count, scale, weights, room, out); break;
      case 3: attend_heads<DIM, 3>(q, keys, values, spans, count, scale, weights, room, out); break;
      case 4: attend_heads<DIM, 4>(q, keys, values, spans, count, scale, weights, room, out); break;
    }
    heads -= now, q += now * DIM, out += now * DIM;
  }
}

template <class W>
using Attend = decltype(&attend_row<8, W>);
