// A layer's attention in a decoding forward: flat rows over spans of the slots that its keys and values
// lie in. What is loaded of a key or value serves several queries: the heads that share it, of rows
// that see the same slots. Each query is summed in an order of its own, so the result of a row does
// not depend on the batch.

#if defined(__AVX512F__)
constexpr int MOST_QUERIES = 12;  // that are computed together: their sums stay in registers
#else
constexpr int MOST_QUERIES = 4;
#endif
constexpr int KEYS = 8;  // whose products are summed together

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

// A row's head: its numbers [DIM], where the result goes, and where its last span ends.
struct Query {
  const float *q;
  float *out;
  int64_t stop;
};

// Attend with queries that share the keys and values [slots][DIM] and the spans [count][2] but for
// the end of the last one, which is here the latest. weights: [QUERIES][room], room for all slots
// that are seen and 2 KEYS more.
template <int DIM, int QUERIES, class W>
static void attend(const Query *queries, const W *keys, const W *values, const int32_t *spans, int64_t count,
                   float scale, float *weights, int64_t room) {
  typedef typename Lanes<DIM>::Type V;
  constexpr int EACH = sizeof(V) / 4, PARTS = DIM / EACH;
  V x[QUERIES][PARTS];
  for (int q = 0; q < QUERIES; q++) {
    UNROLLED for (int i = 0; i < PARTS; i++) x[q][i] = get<V>(queries[q].q + EACH * i) * scale;
  }
  int64_t seen = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t stop = spans[2 * s + 1];
    for (int64_t slot = spans[2 * s]; slot < stop; slot += KEYS) {
      const int64_t there = std::min<int64_t>(KEYS, stop - slot);
      Vector products[QUERIES][KEYS];
      UNROLLED for (int k = 0; k < KEYS; k++) {
        const W *key = keys + (slot + std::min<int64_t>(k, there - 1)) * DIM;  // the last one again
        V sums[QUERIES] = {};
        UNROLLED for (int i = 0; i < PARTS; i++) {
          const V part = get<V>(key + EACH * i);
          UNROLLED for (int q = 0; q < QUERIES; q++) sums[q] += x[q][i] * part;
        }
        UNROLLED for (int q = 0; q < QUERIES; q++) products[q][k] = fold(sums[q]);
      }
      UNROLLED for (int q = 0; q < QUERIES; q++) {
        const Vector *p = products[q];
        const Vector half = pairs(pairs(p[0], p[1]), pairs(p[2], p[3]));
        store(weights + q * room + seen, pairs(half, pairs(pairs(p[4], p[5]), pairs(p[6], p[7]))));
      }
      seen += there;
    }
  }
  float share[QUERIES];
  for (int q = 0; q < QUERIES; q++) {
    float *weight = weights + q * room, most = -INFINITY;
    const int64_t own = count ? seen - (spans[2 * count - 1] - queries[q].stop) : 0;
    for (int64_t i = own; i < seen + KEYS; i++) weight[i] = -INFINITY;  // weigh nothing
    Vector greatest = fill(-INFINITY);
    for (int64_t j = 0; j < own; j += WIDTH) {
      const Vector score = load(weight + j);
      greatest = score > greatest ? score : greatest;
    }
    for (int i = 0; i < WIDTH; i++) most = std::max(most, greatest[i]);
    Vector total = {};
    for (int64_t j = 0; j < own; j += WIDTH) {
      const Vector power = exponential(load(weight + j) - most);
      total += power;
      store(weight + j, power);
    }
    for (int64_t i = own; i < seen; i++) weight[i] = 0.0f;
    share[q] = own ? 1.0f / sum(total) : 0.0f;  // a row that sees nothing gives 0
  }
  // So many parts of a value at once as there are registers for.
  constexpr int SIDE = PARTS % 4 == 0 && QUERIES <= 3 ? 4 : PARTS % 2 == 0 && QUERIES <= 6 ? 2 : 1;
  for (int part = 0; part < PARTS; part += SIDE) {
    V mean[QUERIES][SIDE] = {};
    const float *weight = weights;
    for (int64_t s = 0; s < count; s++) {
      for (int64_t slot = spans[2 * s]; slot < spans[2 * s + 1]; slot++, weight++) {
        UNROLLED for (int i = 0; i < SIDE; i++) {
          const V value = get<V>(values + slot * DIM + EACH * (part + i));
          UNROLLED for (int q = 0; q < QUERIES; q++) mean[q][i] += value * weight[q * room];
        }
      }
    }
    for (int q = 0; q < QUERIES; q++) {
      UNROLLED for (int i = 0; i < SIDE; i++) {
        const V whole = mean[q][i] * share[q];
        std::memcpy(queries[q].out + EACH * (part + i), &whole, sizeof(whole));
      }
    }
  }
}

// The same for any number of queries. Behind them there is room for MOST_QUERIES more.
template <int DIM, class W>
static void attend_all(Query *queries, int64_t number, const W *keys, const W *values, const int32_t *spans,
                       int64_t count, float scale, float *weights, int64_t room) {
  for (int64_t i = 0; i < number; i += MOST_QUERIES) {
    const int64_t now = std::min<int64_t>(MOST_QUERIES, number - i);
    Query *of = queries + i;
    for (int64_t j = now; j < MOST_QUERIES; j++) of[j] = of[now - 1];  // once more
    auto call = [&](auto attend) { attend(of, keys, values, spans, count, scale, weights, room); };
    if (now == 1) call(attend<DIM, 1, W>);
    else if (now <= MOST_QUERIES / 4) call(attend<DIM, MOST_QUERIES / 4, W>);
    else if (now <= MOST_QUERIES / 2) call(attend<DIM, MOST_QUERIES / 2, W>);
    else call(attend<DIM, MOST_QUERIES, W>);
  }
}

template <class W>
using AttendAll = decltype(&attend_all<8, W>);

// How many rows from `row` on see the same slots but for the end of the last span, which may grow a
// little from row to row: up to `most`. last: set to the number of spans up to that one.
static int64_t alike(const int32_t *spans, int64_t ranges, int64_t row, int64_t rows, int64_t most, int64_t &last) {
  const int32_t *first = spans + 2 * row * ranges;
  for (last = ranges; last && first[2 * last - 1] <= first[2 * last - 2]; last--) {}
  int64_t count = 1;
  for (; last && count < most && row + count < rows; count++) {
    const int32_t *own = first + 2 * count * ranges, *before = own - 2 * ranges;
    const int64_t longer = own[2 * last - 1] - before[2 * last - 1];
    bool same = std::equal(own, own + 2 * last - 1, first) && longer >= 0 && longer <= 1;
    for (int64_t s = last; s < ranges; s++) same &= own[2 * s + 1] <= own[2 * s];
    if (!same) break;
  }
  return count;
}
