// The product that both directions share: a matrix that stays on chip, times the state of some columns of the batch.
//
// A CTA holds ROW_TILES tiles of 16 rows. Its warps divide the inner dimension, of INNER_BLOCKS blocks of 64 bytes, and
// each warp keeps its part of the rows, tile by tile of each block: REGISTER_TILES in registers, the others in shared
// memory. The sums of the warps then meet in shared memory. Lane 4 r + q of a warp loads 16 neighbouring bytes of row r and of row
// r + 8, and the same bytes of column r: the matrix instruction sees the inner dimension in another order than memory
// has it, the same for both operands, so that the sum is the same and every load is 16 bytes wide.
#pragma once
#include "numerics.cuh"
#include "plan.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int VECTOR = 16 / sizeof(Element);  // elements of one load
constexpr int BLOCK = 4 * VECTOR;             // elements of a block of the inner dimension
constexpr int INNER_BLOCKS = PADDED / BLOCK;
constexpr int LEAST_BLOCKS = INNER_BLOCKS / WARPS, LONGER_WARPS = INNER_BLOCKS % WARPS;
constexpr int MOST_BLOCKS = LEAST_BLOCKS + (LONGER_WARPS > 0);
constexpr int COLUMNS = 8 * COLUMN_TILES;  // columns that are multiplied at once
constexpr int TILES = ROW_TILES * COLUMN_TILES;
constexpr int TILES_PER_WARP = (TILES + WARPS - 1) / WARPS;

__host__ __device__ constexpr int at_least_zero(int value) { return value > 0 ? value : 0; }

constexpr int LESS_SHARED = at_least_zero(LEAST_BLOCKS * ROW_TILES - REGISTER_TILES);  // tiles of a warp
constexpr int MORE_SHARED = at_least_zero((LEAST_BLOCKS + 1) * ROW_TILES - REGISTER_TILES);
constexpr int SHARED_TILES = LONGER_WARPS * MORE_SHARED + (WARPS - LONGER_WARPS) * LESS_SHARED;
constexpr int WEIGHT_BYTES = SHARED_TILES * 2 * 32 * 16;
constexpr int PARTIAL_BYTES = WARPS * TILES * 32 * 16;

static_assert(PADDED % BLOCK == 0 && PADDED >= HIDDEN, "the padded width is a multiple of a block");
static_assert(GROUPS * PASSES * COLUMNS >= BATCH, "every column belongs to a pass of a group");

struct Lane {
    int warp, index;  // index within the warp
    int row, quad;    // of a fragment of the matrix instruction
    __device__ __forceinline__ Lane()
        : warp(threadIdx.x >> 5), index(threadIdx.x & 31), row(index >> 2), quad(index & 3) {}
};

// 16 bytes from global to shared memory, or zeros; they pass through no register.
__device__ __forceinline__ void copy_asynchronously(uint4* to, const uint4* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

// Not to be moved behind products by the compiler, which would save registers and wait for each load in turn.
__device__ __forceinline__ uint4 load_now(const uint4* at) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at)
                 : "memory");
    return value;
}

struct Weights {
    uint4 registers[REGISTER_TILES > 0 ? REGISTER_TILES : 1][2];
    uint4* shared;  // [tile][half][lane]
    int first_block;
    bool is_longer;  // this warp has one block more than others

    __device__ __forceinline__ bool has(int block) const { return block < LEAST_BLOCKS || is_longer; }

    // `offset_of(tile, half)` says where row `lane.row + 8 * half` of a tile begins in `matrix`, or -1 for a row of
    // zeros. Each lane reads only what it has loaded itself: no barrier is needed.
    template <typename OffsetOf>
    __device__ __forceinline__ void load(uint4* shared_memory, const Lane& lane, const Element* matrix,
                                         OffsetOf offset_of) {
        const int longer_before = min(lane.warp, LONGER_WARPS);
        is_longer = lane.warp < LONGER_WARPS;
        first_block = lane.warp * LEAST_BLOCKS + longer_before;
        shared = shared_memory + lane.index +
                 (longer_before * MORE_SHARED + (lane.warp - longer_before) * LESS_SHARED) * 2 * 32;
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; row_tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int offset = offset_of(row_tile, half);
                const uint4* from =
                    reinterpret_cast<const uint4*>(matrix + max(offset, 0) + first_block * BLOCK) + lane.quad;
#pragma unroll
                for (int block = 0; block < MOST_BLOCKS; block++) {
                    const int tile = block * ROW_TILES + row_tile;
                    if (tile >= REGISTER_TILES) {
                        if (has(block))
                            copy_asynchronously(&shared[((tile - REGISTER_TILES) * 2 + half) * 32], from + 4 * block,
                                                offset >= 0);
                    } else {
                        registers[tile][half] = make_uint4(0, 0, 0, 0);
                        if (has(block) && offset >= 0) registers[tile][half] = __ldcg(from + 4 * block);
                    }
                }
            }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    // Sums of this warp's part of the inner dimension. `state` is column 0 of the batch, `stride` what columns are apart.
    __device__ __forceinline__ void multiply(float4 (&sums)[ROW_TILES][COLUMN_TILES], const Lane& lane,
                                             const Element* state, int stride, int first_column) const {
        uint4 values[MOST_BLOCKS][COLUMN_TILES];
#pragma unroll
        for (int block = 0; block < MOST_BLOCKS; block++)
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile++) {
                const int column = first_column + 8 * tile + lane.row;
                values[block][tile] = make_uint4(0, 0, 0, 0);
                if (has(block) && column < BATCH)
                    values[block][tile] = load_now(
                        reinterpret_cast<const uint4*>(state + (size_t)column * stride + (first_block + block) * BLOCK) +
                        lane.quad);
            }
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) sums[m][n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int block = 0; block < MOST_BLOCKS; block++) {
            if (!has(block)) break;
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                uint4 upper, lower;
                const int tile = block * ROW_TILES + m;
                if (tile < REGISTER_TILES) {
                    upper = registers[tile][0];
                    lower = registers[tile][1];
                } else {
                    upper = shared[(tile - REGISTER_TILES) * 2 * 32];
                    lower = shared[(tile - REGISTER_TILES) * 2 * 32 + 32];
                }
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++)
                    Type<Element>::multiply_add(sums[m][n], upper.x, lower.x, upper.y, lower.y, values[block][n].x,
                                                values[block][n].y);
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++)
                    Type<Element>::multiply_add(sums[m][n], upper.z, lower.z, upper.w, lower.w, values[block][n].z,
                                                values[block][n].w);
            }
        }
    }
};

// [warp][row tile][column tile][lane]
__device__ __forceinline__ void put_partial_sums(float4* partials, const float4 (&sums)[ROW_TILES][COLUMN_TILES],
                                                 const Lane& lane) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
            partials[(lane.warp * TILES + m * COLUMN_TILES + n) * 32 + lane.index] = sums[m][n];
}

// Rows `lane.row` (x, y) and `lane.row + 8` (z, w) of a tile, columns `2 * lane.quad` and the next. The order of the sum
// is fixed, so that repeated runs give the same bits.
__device__ __forceinline__ float4 whole_sum(const float4* partials, int tile, const Lane& lane) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float4 part = partials[(warp * TILES + tile) * 32 + lane.index];
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
    }
    return sum;
}
