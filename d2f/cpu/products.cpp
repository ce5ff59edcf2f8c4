// Matrix products with packed weights, for the few rows of a decoding step: reading the weights is
// what they cost, so every weight is read once, in the order in which it lies.
//
//     y[row][o] = sum over i of x[row][i] W[o][i]
//
// A weight [O, I] lies in blocks of 16 outputs, so that one vector has an input of 16 outputs:
//
//     fp32    [O / 16][I][16]
//     bf16    [O / 16][I / 2][16][2]    pairs of inputs, as AVX512-BF16 multiplies them
//
// O is rounded up to a multiple of 16 and I of 32, with zeros. Each output of each row is summed in
// one order, from the first input to the last, whatever rows and blocks are beside it: a row's result
// is the same to the bit in any batch, on any number of threads.

constexpr int LANES = 16;
constexpr int STEP = 32;  // inputs of a tile
typedef float Sixteen __attribute__((vector_size(4 * LANES)));
typedef int32_t SixteenBits __attribute__((vector_size(4 * LANES)));
typedef float SixteenInMemory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr int64_t AHEAD = 4096;  // bytes that a weight is asked for before it is read
// Wide is what a register holds, PARTS how many of them an input of 16 outputs needs: GCC keeps
// arrays of wider vectors in memory. Rows and blocks that are multiplied at once have sums that fit
// into the registers; each input that is loaded meets several weights, each weight several inputs.
#if defined(__AVX512F__)
typedef Sixteen Wide;
constexpr int MOST_ROWS = 12, MOST_SUMS = 24;
constexpr int blocks_of(int rows) { return rows <= 4 ? 1 : rows <= 6 ? 4 : 2; }
#else
typedef Vector Wide;
constexpr int MOST_ROWS = 6, MOST_SUMS = 12;
constexpr int blocks_of(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
constexpr int EACH = sizeof(Wide) / 4, PARTS = LANES / EACH;
constexpr int MOST_BLOCKS = 4;

template <class V, class T>
static inline V get(const T *at) {
  V x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

static inline Wide widened(const float *at) { return get<Wide>(at); }

static inline Wide widened(const Bf16 *at) {
  typedef uint16_t Halves __attribute__((vector_size(sizeof(Wide) / 2)));
  typedef int32_t Words __attribute__((vector_size(sizeof(Wide))));
  const Words bits = __builtin_convertvector(get<Halves>(at), Words) << 16;
  return get<Wide>(&bits);
}

static inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Blocks that are read, of `block` bytes each, and which of the tiles of rows they are read for.
struct Turn {
  int64_t blocks = 1, block = 0, tile = 0, tiles = 1;
  int64_t next = blocks * block + tile * block / tiles, step = 64 / tiles;
};

// Ask for a weight before it is read: where all rows are one tile, for what is read AHEAD bytes later
// (of G blocks that are read side by side, the ends are followed by the begin of the next G blocks,
// G - 1 blocks further on). Where there are more, the memory would rest from the second on, when the
// blocks are in the cache; so each asks for its part of the next blocks. done: bytes of the block.
template <int G>
static inline void fetch(const void *at, int64_t done, const Turn &turn) {
  int64_t further = AHEAD + (done + AHEAD < turn.block ? 0 : (G - 1) * turn.block);
  if (turn.tiles > 1) further = turn.next - done + done / 64 * turn.step;
  __builtin_prefetch(static_cast<const char *>(at) + further, 0, 3);
}

// The rows to multiply: with AVX512-BF16 weights in bf16 take rows in bf16, else they are widened in
// registers and take rows in fp32.
template <class W>
struct Multiplied {
  typedef float Input;
};
#if defined(__AVX512BF16__)
template <>
struct Multiplied<Bf16> {
  typedef Bf16 Input;
};
#endif
template <class W>
using Input = typename Multiplied<W>::Input;

// G blocks from w on, with N rows x [N][inputs]: the outputs [N][G], of which a row has turn.blocks.
template <int N, int G>
static void multiply(const float *w, const float *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  Wide sums[N][G * PARTS] = {};
  for (int64_t i = 0; i < inputs; i++) {
    Wide weights[G * PARTS];
    UNROLLED for (int g = 0; g < G; g++) {
      const float *at = w + (g * inputs + i) * LANES;
      fetch<G>(at, i * 64, turn);
      UNROLLED for (int p = 0; p < PARTS; p++) weights[g * PARTS + p] = get<Wide>(at + p * EACH);
    }
    UNROLLED for (int n = 0; n < N; n++) {
      UNROLLED for (int p = 0; p < G * PARTS; p++) sums[n][p] += weights[p] * x[n * inputs + i];
    }
  }
  for (int n = 0; n < N; n++) std::memcpy(out + n * turn.blocks, sums[n], sizeof(sums[n]));
}

#if defined(__AVX512BF16__)
typedef int PairInMemory __attribute__((aligned(2), may_alias));

template <int N, int G>
static void multiply(const Bf16 *w, const Bf16 *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  __m512 sums[N][G];
  UNROLLED for (int n = 0; n < N; n++) {
    UNROLLED for (int g = 0; g < G; g++) sums[n][g] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < inputs; i += 2) {
    __m512bh weights[G];
    UNROLLED for (int g = 0; g < G; g++) {
      const Bf16 *at = w + (g * inputs + i) * LANES;
      fetch<G>(at, i * 32, turn);
      weights[g] = (__m512bh)_mm512_loadu_si512(at);
    }
    UNROLLED for (int n = 0; n < N; n++) {
      const PairInMemory *pair = reinterpret_cast<const PairInMemory *>(x + n * inputs + i);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(*pair);
      UNROLLED for (int g = 0; g < G; g++) sums[n][g] = _mm512_dpbf16_ps(sums[n][g], weights[g], both);
    }
  }
  for (int n = 0; n < N; n++) std::memcpy(out + n * turn.blocks, sums[n], sizeof(sums[n]));
}
#else
typedef int32_t WideBits __attribute__((vector_size(sizeof(Wide))));

template <int N, int G>
static void multiply(const Bf16 *w, const float *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  Wide sums[N][G * PARTS] = {};
  for (int64_t i = 0; i < inputs; i += 2) {
    UNROLLED for (int second = 0; second < 2; second++) {
      Wide weights[G * PARTS];
      UNROLLED for (int g = 0; g < G; g++) {
        const Bf16 *at = w + (g * inputs + i) * LANES;
        if (!second) fetch<G>(at, i * 32, turn);
        UNROLLED for (int p = 0; p < PARTS; p++) {
          const WideBits both = get<WideBits>(at + 2 * p * EACH);  // the first is below: little-endian
          const WideBits one = second ? both & int32_t(0xffff0000) : both << 16;
          std::memcpy(&weights[g * PARTS + p], &one, sizeof(one));
        }
      }
      UNROLLED for (int n = 0; n < N; n++) {
        UNROLLED for (int p = 0; p < G * PARTS; p++) sums[n][p] += weights[p] * x[n * inputs + i + second];
      }
    }
  }
  for (int n = 0; n < N; n++) std::memcpy(out + n * turn.blocks, sums[n], sizeof(sums[n]));
}
#endif

// AMX multiplies tiles of 16 lines of 64 bytes: 16 rows with 32 of their inputs, and a block's weights
// for these, which lie as it reads them. It sums in another order than the instructions above, so
// where it is there, it multiplies one row as well as many.
#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
constexpr int TILE_ROWS = 16;
typedef uint16_t ThirtyTwo __attribute__((vector_size(64)));

// Tell the compiler that memory is complete: it does not know that tiles read it.
static inline void filled() { __asm__ volatile("" ::: "memory"); }

// Ask the kernel for the tiles' registers; it may refuse, as old ones and some sandboxes do.
static const bool TILED = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);

// A thread's tiles, all of the same shape.
struct Tiles {
  Tiles() {
    if (!TILED) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~Tiles() {
    if (TILED) _tile_release();
  }
};

// G blocks from w on, with R tiles of rows x [16 R][inputs]: the outputs [16 R][G]. Tiles 0 to 3 hold
// the sums, 4 and 5 rows, 6 and 7 weights.
template <int R, int G>
static void multiply_tiles(const Bf16 *w, const Bf16 *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  filled();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const Bf16 *further = x + TILE_ROWS * inputs, *next = w + LANES * inputs;
  for (int64_t i = 0; i < inputs; i += STEP) {
    for (int line = 0; line < 16; line++) {
      UNROLLED for (int g = 0; g < G; g++)
        fetch<G>(w + (g * inputs + i + 2 * line) * LANES, i * 32, turn);
    }
    _tile_loadd(4, x + i, 2 * inputs);
    _tile_loadd(6, w + i * LANES, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (G > 1) {
      _tile_loadd(7, next + i * LANES, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, further + i, 2 * inputs);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (G > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t LINE = G * sizeof(Sixteen);
  _tile_stored(0, out, LINE);
  if constexpr (G > 1) _tile_stored(1, out + 1, LINE);
  if constexpr (R > 1) _tile_stored(2, out + TILE_ROWS * G, LINE);
  if constexpr (R > 1 && G > 1) _tile_stored(3, out + TILE_ROWS * G + 1, LINE);
}

static void multiply_tiles(int64_t rows, const Bf16 *w, const Bf16 *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  auto call = [&](auto multiply) { multiply(w, x, inputs, out, turn); };
  if (rows > TILE_ROWS) turn.blocks == 2 ? call(multiply_tiles<2, 2>) : call(multiply_tiles<2, 1>);
  else turn.blocks == 2 ? call(multiply_tiles<1, 2>) : call(multiply_tiles<1, 1>);
}
#else
constexpr bool TILED = false;
constexpr int TILE_ROWS = 0;
struct Tiles {};
static void multiply_tiles(int64_t, const Bf16 *, const void *, int64_t, Sixteen *, const Turn &) {}
#endif

// Call `multiply` for numbers of rows and blocks: 1, 2 or blocks_of these rows.
template <class W, int N = 1>
static void multiply(int64_t rows, const W *w, const Input<W> *x, int64_t inputs, Sixteen *out, const Turn &turn) {
  if (rows == N) {
    if (turn.blocks > 2) {
      multiply<N, blocks_of(N)>(w, x, inputs, out, turn);
    } else if (turn.blocks == 2 && 2 * N * PARTS <= MOST_SUMS) {
      multiply<N, 2>(w, x, inputs, out, turn);
    } else {
      for (int64_t b = 0; b < turn.blocks; b++) multiply<N, 1>(w + b * LANES * inputs, x, inputs, out + b, turn);
    }
    return;
  }
  if constexpr (N < MOST_ROWS) multiply<W, N + 1>(rows, w, x, inputs, out, turn);
}

// A linear layer, or several with one input. bias: [outputs] or null.
struct Product {
  const void *weight;
  const float *bias;
  int64_t inputs, outputs;  // inputs: a multiple of 32
};

// Multiply rows [rows][inputs] with a thread's part of the weight, so many blocks at a time as are
// a multiple of `joined`. Calls f(row, block, outputs of that block and the joined - 1 behind it).
// In tiles up to 15 rows behind x are read, too, whatever lies there.
template <class W, class F>
static void product(const Thread &t, const Product &p, int64_t joined, const Input<W> *x, int64_t rows, F f) {
  constexpr bool BF16 = std::is_same_v<W, Bf16>;
  const bool tiled = BF16 && TILED;
  const int64_t most = tiled ? 2 * TILE_ROWS : MOST_ROWS, tiles = (rows + most - 1) / most;
  const Part units = t.part(round_up(p.outputs, LANES) / LANES / joined);
  const Part part{units.begin * joined, units.end * joined};
  if (!tiles) return;
  const int64_t together = tiled ? 2 : std::max<int64_t>(joined, blocks_of(int((rows + tiles - 1) / tiles)));
  Sixteen out[std::max(MOST_ROWS * MOST_BLOCKS, 4 * TILE_ROWS)];
  int64_t blocks;
  for (int64_t block = part.begin; block < part.end; block += blocks) {
    const int64_t left = part.end - block;
    blocks = left >= together ? together : left >= 2 ? 2 : 1;
    const W *weight = static_cast<const W *>(p.weight) + block * LANES * p.inputs;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t row = tiled ? i * most : rows * i / tiles;
      const int64_t count = (tiled ? std::min(rows, row + most) : rows * (i + 1) / tiles) - row;
      const Input<W> *from = x + row * p.inputs;
      const int64_t bytes = LANES * p.inputs * sizeof(W);
      const Turn turn = tiled ? Turn{blocks, bytes} : Turn{blocks, bytes, i, tiles};
      if constexpr (BF16) {
        if (TILED) multiply_tiles(count, weight, from, p.inputs, out, turn);
        else multiply<W>(count, weight, from, p.inputs, out, turn);
      } else {
        multiply<W>(count, weight, from, p.inputs, out, turn);
      }
      for (int64_t n = 0; n < count; n++)
        for (int64_t b = 0; b < blocks; b += joined) f(row + n, block + b, out + n * blocks + b);
    }
  }
}
