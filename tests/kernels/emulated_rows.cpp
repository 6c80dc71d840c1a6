// Runs reorder_rows.cu as _cuda.py launches it: ROWS GROUPS MASK OUT, the mask a byte each; what was not written is 0xbb.
#include "emulated.h"

#include "kernel.cu"

template <class T> static std::vector<T> unwritten(size_t size) {
  std::vector<T> found(size);
  memset(found.data(), 0xbb, size * sizeof(T));
  return found;
}
template <class T> static void put(FILE* file, const std::vector<T>& values) { fwrite(values.data(), sizeof(T), values.size(), file); }

int main(int, char** arguments) {
  const int rows = atoi(arguments[1]), groups = atoi(arguments[2]);
  std::vector<u8> mask(rows * groups);
  FILE* file = fopen(arguments[3], "rb");
  if (!file || fread(mask.data(), 1, mask.size(), file) != mask.size()) return 1;
  fclose(file);
  const int packs = (rows + PACK_ROWS - 1) / PACK_ROWS, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, chunks = (rows + CHUNK - 1) / CHUNK;
  auto packed = unwritten<uint4>(rows), places = unwritten<uint4>(rows);
  auto counts = unwritten<u16>(packs * MAX_GROUPS);
  // Not 0xbb, which no row's bucket is: what lies beyond the last row must not count as a row of bucket 1.
  std::vector<uint4> buckets((rows + 15) / 16);
  memset(buckets.data(), 1, buckets.size() * sizeof(uint4));
  auto index = unwritten<int>(rows), cost = unwritten<int>(tiles), list = unwritten<int>(tiles);
  auto executed = unwritten<u32>(COUNT * rows), unions = unwritten<u32>(2 * tiles * COUNT);
  launch(packs, THREADS, [&] { rows_pack(mask.data(), packed.data(), counts.data(), rows, groups, groups, 1); });
  launch((rows + RANK_ROWS - 1) / RANK_ROWS, RANK_ROWS, [&] { rows_rank(packed.data(), (const uint4*)counts.data(), places.data(), (u8*)buckets.data(), rows, groups); });
  launch(chunks * (groups + 1), THREADS, [&] { rows_order(places.data(), buckets.data(), index.data(), rows, groups, min(groups, 32)); });
  launch(tiles, TILE_ROWS, [&] { rows_words(packed.data(), index.data(), executed.data(), unions.data(), cost.data(), rows); });
  launch((tiles + 255) / 256, 256, [&] { rows_items(cost.data(), list.data(), tiles); });
  file = fopen(arguments[4], "wb");
  put(file, index), put(file, executed), put(file, unions), put(file, list);
  return fclose(file);
}
