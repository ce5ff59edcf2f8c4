// Vectors of GCC's and clang's own kind, which every CPU has in some width; bf16; threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // so that arrays of vectors stay in registers
constexpr int WIDTH = 8;
typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef float InMemory __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t HalvesInMemory __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

// The upper half of a float.
struct Bf16 {
  uint16_t bits;
};

static inline Vector load(const float *at) { return *reinterpret_cast<const InMemory *>(at); }

static inline Vector load(const Bf16 *at) {
  const Halves halves = *reinterpret_cast<const HalvesInMemory *>(at);
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Vector x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

static inline void store(float *at, Vector x) { *reinterpret_cast<InMemory *>(at) = x; }

// Round to the nearest bf16, of two as near to the even one.
static inline void store(Bf16 *at, Vector x) {
  Bits bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const Bits rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  const Bits chosen = x == x ? rounded : Bits{} + 0x7fc0;  // NaN stays one
  *reinterpret_cast<HalvesInMemory *>(at) = __builtin_convertvector(chosen, Halves);
}

static inline float number(float x) { return x; }

static inline float number(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

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

// A thread's part of the work between two barriers: the numbers [begin, end) of `count`.
struct Part {
  int64_t begin, end;
};

struct Thread {
  int number = 0, threads = 1;
  Part part(int64_t count) const {
    return {count * number / threads, count * (number + 1) / threads};
  }
};

// Run f(Thread) on all threads. Inside, `wait` is a barrier for all of them.
template <class F>
static void on_threads(int threads, F f) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(Thread{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  f(Thread{});
}

static inline void wait(const Thread &t) {
  if (t.threads > 1) {
#pragma omp barrier
  }
}

// Uninitialised memory on cache lines of its own.
template <class T>
struct Buffer {
  std::unique_ptr<void, decltype(&std::free)> memory;
  explicit Buffer(int64_t count)
      : memory(std::aligned_alloc(64, (std::max<int64_t>(count, 1) * sizeof(T) + 63) / 64 * 64), &std::free) {}
  T *data() const { return static_cast<T *>(memory.get()); }
};
