/* Memory bandwidth as STREAM measures it, and by reading alone, as decoding a token mostly does.
   Arrays are far larger than the caches; the caller times the calls, one thread a core. */
#include <stddef.h>

void triad(double *restrict a, const double *restrict b, const double *restrict c, size_t n) {
  for (size_t i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
}

double read_sum(const double *restrict a, size_t n) {
  double sums[32] = {0};
  for (size_t i = 0; i + 32 <= n; i += 32)
    for (size_t j = 0; j < 32; j++) sums[j] += a[i + j];
  double sum = 0;
  for (size_t j = 0; j < 32; j++) sum += sums[j];
  return sum;
}
