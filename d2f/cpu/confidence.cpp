// The chosen token and the model's confidence in rows of fp32 logits, in two passes: one for the two
// largest and one for the sums. triton_kernels/confidence.py defines the figures. __init__.py compiles this
// file behind vectors.cpp.
//
// Each row is computed alone, so its result does not depend on the batch.

struct Scored {
  const float *logits;   // [rows, vocabulary]
  const int64_t *named;  // [rows], or null: then the table has its first two lines alone
  double *table;         // [2 or 6, rows]: token, probability, named, its log, entropy, margin
  int64_t rows, vocabulary, mask, threads;  // mask: the id that is never chosen, or -1
};

// The two largest of count logits, the second as large as the first where it is there twice.
static void two_largest(const float *z, int64_t count, float &best, float &second) {
  Vector first = fill(-INFINITY), next = first;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const Vector x = load(z + i), less = x < first ? x : first;
    next = next < less ? less : next;
    first = first < x ? x : first;
  }
  auto take = [&](float x) {
    second = std::max(second, std::min(best, x));
    best = std::max(best, x);
  };
  for (int lane = 0; lane < WIDTH; lane++) {
    take(first[lane]);
    take(next[lane]);
  }
  for (; i < count; i++) take(z[i]);
}

static void score_row(const Scored &x, int64_t row) {
  const int64_t count = x.vocabulary, begin = x.mask < 0 ? count : x.mask;
  const float *z = x.logits + row * count;
  float best = -INFINITY, second = -INFINITY;
  two_largest(z, begin, best, second);
  if (x.mask >= 0) two_largest(z + begin + 1, count - begin - 1, best, second);
  int64_t token = 0;  // the lowest id of equal ones
  while (token < count && (token == x.mask || !(z[token] == best))) token++;
  if (token == count) token = 0;  // there is a NaN, so the probability will be one
  const float most = x.mask < 0 ? best : std::max(best, z[x.mask]);
  // In fp64 from chunk to chunk: a vocabulary has a hundred thousand of them.
  double total = 0.0, weighted = 0.0;
  constexpr int64_t CHUNK = 128 * WIDTH;
  for (int64_t from = 0; from < count; from += CHUNK) {
    const int64_t to = std::min(count, from + CHUNK);
    Vector powers = {}, products = {};
    for (int64_t i = from; i < to; i += WIDTH) {
      Vector d = fill(-INFINITY);
      if (i + WIDTH <= to)
        d = load(z + i) - most;
      else
        for (int64_t j = i; j < to; j++) d[j - i] = z[j] - most;
      const Vector power = exponential(d);
      powers += power;
      products += power * (d < fill(-87.0f) ? Vector{} : d);  // 0 times -inf would be NaN
    }
    total += sum(powers);
    weighted += sum(products);
  }
  const double log_total = std::log(total);
  double *at = x.table + row;
  at[0] = double(token);
  at[x.rows] = std::exp(double(z[token] - most)) / total;
  if (!x.named) return;
  const double named = double(z[x.named[row]] - most);
  at[2 * x.rows] = std::exp(named) / total;
  at[3 * x.rows] = named - log_total;
  at[4 * x.rows] = log_total - weighted / total;
  at[5 * x.rows] = (std::exp(double(best - most)) - std::exp(double(second - most))) / total;
}

extern "C" void score(const Scored *given) {
  const Scored &x = *given;
  const bool parallel = x.threads > 1 && x.rows > 1 && x.rows * x.vocabulary > (1 << 14);
#pragma omp parallel for schedule(static) num_threads(int(x.threads)) if (parallel)
  for (int64_t row = 0; row < x.rows; row++) score_row(x, row);
}
