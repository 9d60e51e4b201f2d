// SPDX-License-Identifier: Apache-2.0
// The mover's kernel: kernels/move.py again, over the same table. kernel.ptx is made of it by `python -m tools.kernels`.

typedef long long number;

// Parameters: see kernels/move.py. word: bytes that column 5 of the table counts in.
#define PARAMETERS                                                                                              \
  const number *table, const number *ids, char *slot, number total, number pieces, number blocks, number step, \
      number whole, number base, number word

template <typename W, bool SCATTER>
__device__ __forceinline__ void move(PARAMETERS) {
  for (number at = blockIdx.x; at < total; at += gridDim.x) {
    const number block = at % blocks, chunk = at / (blocks * pieces);
    const number *row = table + at / blocks % pieces * 6;
    const number id = ids[chunk * whole + block];
    W *cache = reinterpret_cast<W *>(row[0] + id * row[1]);
    W *ring = reinterpret_cast<W *>(slot + chunk * step + (row[2] - base) * whole + block * row[3] + row[4]);
    const number words = row[5] * word / sizeof(W);
    for (number i = threadIdx.x; i < words; i += blockDim.x) {
      if (!SCATTER) ring[i] = id >= 0 ? cache[i] : W{};
      else if (id >= 0) cache[i] = ring[i];
    }
  }
}

// For each size of a word that divides all addresses, steps and lengths of a table.
#define KERNELS(UNIT, W)                                                                  \
  extern "C" __global__ void gather_##UNIT(PARAMETERS) {                                 \
    move<W, false>(table, ids, slot, total, pieces, blocks, step, whole, base, word);    \
  }                                                                                       \
  extern "C" __global__ void scatter_##UNIT(PARAMETERS) {                                \
    move<W, true>(table, ids, slot, total, pieces, blocks, step, whole, base, word);     \
  }

KERNELS(16, uint4)
KERNELS(8, unsigned long long)
KERNELS(4, unsigned int)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)
