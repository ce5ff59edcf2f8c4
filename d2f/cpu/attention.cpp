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
constexpr int ROOM_QUERIES = std::max(MOST_QUERIES, 16), ROOM_KEYS = 64;  // as tiles need them

// A vector of a head: what a register holds where its dimension is a multiple of that, else 8 numbers.
template <int DIM>
struct Lanes {
  typedef std::conditional_t<DIM % EACH == 0, Wide, Vector> Type;
};

template <class V>
static inline V get(const Bf16 *at) {
  typedef std::conditional_t<sizeof(V) == 64, uint16_t __attribute__((vector_size(32))), Halves> Half;
  typedef std::conditional_t<sizeof(V) == 64, SixteenBits, Bits> Whole;
  const Whole bits = __builtin_convertvector(get<Half>(&at->bits), Whole) << 16;
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

  // How many slots it sees of those that its spans but for this end have.
  int64_t own(const int32_t *spans, int64_t count, int64_t seen) const {
    return count ? seen - (spans[2 * count - 1] - stop) : 0;
  }
};

// Turn the scores of a query's own slots into weights e^(score - most), 0 for further ones up to
// `seen`, and return 1 / their sum.
static float weigh(float *weight, int64_t own, int64_t seen) {
  float most = -INFINITY;
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
  return own ? 1.0f / sum(total) : 0.0f;  // a row that sees nothing gives 0
}

// Attend with queries that share the keys and values [slots][DIM] and the spans [count][2] but for
// the end of the last one, which is here the latest. weights: [QUERIES][room], room for all slots
// that are seen and 2 KEYS more.
template <int DIM, int QUERIES, class W>
static void attend(const Query *queries, const W *keys, const W *values, const int32_t *spans, int64_t count,
                   float scale, float *weights, int64_t room) {
  typedef typename Lanes<DIM>::Type V;
  constexpr int EACH = sizeof(V) / 4, PARTS = DIM / EACH;  // of a head
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
  for (int q = 0; q < QUERIES; q++) share[q] = weigh(weights + q * room, queries[q].own(spans, count, seen), seen);
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

#if defined(TILES)
// Make columns of 16 rows of 16 words.
static inline void transpose(__m512i *rows) {
  UNROLLED for (int step = 1; step < 16; step *= 2) {
    SixteenBits first, second;  // of each lane: which of the 32 words of two rows
    for (int l = 0; l < 16; l++) first[l] = l & step ? 16 + l - step : l, second[l] = l & step ? 16 + l : l + step;
    UNROLLED for (int i = 0; i < 16; i++) {
      if (i & step) continue;
      const __m512i a = rows[i], b = rows[i + step];
      rows[i] = _mm512_permutex2var_epi32(a, (__m512i)first, b);
      rows[i + step] = _mm512_permutex2var_epi32(a, (__m512i)second, b);
    }
  }
}

// The same in AMX's tiles, for up to 16 queries, whose numbers and weights are rounded to bf16:
// keys [16][DIM] times queries, then weights [16 queries][32 slots] times values.
template <int DIM>
static void attend_in_tiles(const Query *queries, int64_t number, const Bf16 *keys, const Bf16 *values,
                            const int32_t *spans, int64_t count, float scale, float *weights, int64_t room) {
  __m512i square[16], packed[DIM / 2], tail[DIM / 2], pairs[32];
  for (int d = 0; d < DIM; d += STEP) {
    for (int q = 0; q < 16; q++) {
      const float *from = queries[std::min<int64_t>(q, number - 1)].q + d;
      Bf16 *to = reinterpret_cast<Bf16 *>(square + q);
      for (int i = 0; i < STEP; i += WIDTH) store(to + i, load(from + i) * scale);
    }
    transpose(square);
    std::memcpy(packed + d / 2, square, sizeof(square));  // [16 pairs of numbers][16 queries][2]
  }
  filled();
  _tile_loadd(4, packed, 64);
  if constexpr (DIM > 32) _tile_loadd(5, packed + 16, 64);
  if constexpr (DIM > 64) _tile_loadd(6, packed + 32, 64);
  if constexpr (DIM > 96) _tile_loadd(7, packed + 48, 64);
  int64_t seen = 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t stop = spans[2 * s + 1];
    for (int64_t slot = spans[2 * s]; slot < stop; slot += 16) {
      const int64_t there = std::min<int64_t>(16, stop - slot);
      const void *key = keys + slot * DIM;
      if (there < 16) {  // there may be no memory behind them
        std::memcpy(tail, key, there * DIM * sizeof(Bf16));
        key = tail;
        filled();
      }
      const Bf16 *at = static_cast<const Bf16 *>(key);
      _tile_zero(0);
      _tile_loadd(1, at, 2 * DIM);
      _tile_dpbf16ps(0, 1, 4);
      if constexpr (DIM > 32) {
        _tile_loadd(2, at + 32, 2 * DIM);
        _tile_dpbf16ps(0, 2, 5);
      }
      if constexpr (DIM > 64) {
        _tile_loadd(1, at + 64, 2 * DIM);
        _tile_dpbf16ps(0, 1, 6);
      }
      if constexpr (DIM > 96) {
        _tile_loadd(2, at + 96, 2 * DIM);
        _tile_dpbf16ps(0, 2, 7);
      }
      _tile_stored(0, square, 64);
      transpose(square);
      for (int64_t q = 0; q < number; q++) _mm512_storeu_si512(weights + q * room + seen, square[q]);
      seen += there;
    }
  }
  float share[16];
  for (int64_t q = 0; q < number; q++) {
    float *weight = weights + q * room;
    share[q] = weigh(weight, queries[q].own(spans, count, seen), seen);
    std::fill_n(weight + seen, STEP, 0.0f);
    Bf16 *rounded = reinterpret_cast<Bf16 *>(weight);  // in the same place
    for (int64_t i = 0; i < seen + STEP; i += WIDTH) store(rounded + i, load(weight + i));
  }
  ThirtyTwo low, high;  // the numbers of two slots in turns
  for (int i = 0; i < 32; i++) low[i] = i / 2 + i % 2 * 32, high[i] = low[i] + 16;
  for (int d = 0; d < DIM; d += STEP) {
    _tile_zero(0);
    _tile_zero(1);
    int64_t from = 0;
    for (int64_t s = 0; s < count; s++) {
      const int64_t stop = spans[2 * s + 1];
      for (int64_t slot = spans[2 * s]; slot < stop; slot += STEP) {
        const int64_t there = std::min<int64_t>(STEP, stop - slot);
        for (int k = 0; k < STEP / 2; k++) {
          const Bf16 *value = values + (slot + 2 * k) * DIM + d;
          const __m512i a = 2 * k < there ? _mm512_loadu_si512(value) : _mm512_setzero_si512();
          const __m512i b = 2 * k + 1 < there ? _mm512_loadu_si512(value + DIM) : _mm512_setzero_si512();
          pairs[k] = _mm512_permutex2var_epi16(a, (__m512i)low, b);
          pairs[16 + k] = _mm512_permutex2var_epi16(a, (__m512i)high, b);
        }
        filled();
        _tile_loadd(2, reinterpret_cast<Bf16 *>(weights) + from, 4 * room);
        _tile_loadd(6, pairs, 64);
        _tile_loadd(7, pairs + 16, 64);
        _tile_dpbf16ps(0, 2, 6);
        _tile_dpbf16ps(1, 2, 7);
        from += there;
      }
    }
    _tile_stored(0, pairs, 64);
    _tile_stored(1, pairs + 16, 64);
    for (int64_t q = 0; q < number; q++) {
      for (int half = 0; half < 2; half++) {
        const Sixteen whole = (Sixteen)pairs[16 * half + q] * share[q];
        std::memcpy(queries[q].out + d + 16 * half, &whole, sizeof(whole));
      }
    }
  }
}
#else
template <int DIM, class W>
static void attend_in_tiles(const Query *, int64_t, const W *, const W *, const int32_t *, int64_t, float, float *, int64_t) {}
#endif

// The same for any number of queries. Behind them there is room for MOST_QUERIES more.
template <int DIM, class W>
static void attend_all(Query *queries, int64_t number, const W *keys, const W *values, const int32_t *spans,
                       int64_t count, float scale, float *weights, int64_t room) {
  if constexpr (std::is_same_v<W, Bf16> && DIM % STEP == 0) {
    for (int64_t i = 0; TILED && i < number; i += 16)
      attend_in_tiles<DIM>(queries + i, std::min<int64_t>(16, number - i), keys, values, spans, count, scale, weights, room);
    if (TILED) return;
  }
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
