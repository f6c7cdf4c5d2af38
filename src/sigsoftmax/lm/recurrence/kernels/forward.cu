// The forward recurrence of one LSTM layer over a window, in one launch.
//
// The grid is GROUPS times UNIT_BLOCKS CTAs. A CTA owns 4 * ROW_TILES hidden units, all four gates of each, and keeps
// their rows of the recurrent matrix on chip for the whole window. Each group holds the whole matrix and serves its own
// columns of the batch, in PASSES passes: while the state of one pass crosses the chip, the next one is multiplied.
#include "exchange.cuh"
#include "products.cuh"

constexpr int UNITS = 4 * ROW_TILES;  // of a CTA
constexpr int UNIT_BLOCKS = (PADDED + UNITS - 1) / UNITS;
constexpr int CELL_BYTES = PASSES * TILES_PER_WARP * THREADS * 4;
static_assert(SHARED_BYTES == WEIGHT_BYTES + PARTIAL_BYTES + CELL_BYTES, "the planner counts as the kernel does");
static_assert(CTAS == GROUPS * UNIT_BLOCKS && PASSES <= THREADS, "the planner counts as the kernel does");

// Rows 0 to 7 of a tile are gates i and f of four units, rows 8 to 15 gates g and o. So lanes of the lower half of a warp
// hold i and g of two columns, lanes of the upper half f and o; after an exchange each has all gates of one column.
struct Cell {
    int unit, column;
    bool is_real, is_stored;  // one of the model's; one of the padded buffers'

    __device__ __forceinline__ Cell(int first_unit, int first_column, int tile, const Lane& lane)
        : unit(first_unit + 4 * (tile / COLUMN_TILES) + (lane.row & 3)),
          column(first_column + 8 * (tile % COLUMN_TILES) + 2 * lane.quad + (lane.row >> 2)),
          is_real(tile < TILES && unit < HIDDEN && column < BATCH),
          is_stored(tile < TILES && unit < PADDED && column < BATCH) {}
    __device__ __forceinline__ size_t padded() const { return (size_t)column * PADDED + unit; }
    __device__ __forceinline__ size_t unpadded() const { return (size_t)column * HIDDEN + unit; }
};

// Four neighbouring units are in lanes 4 apart: bf16 values leave as one store of 8 bytes. Called by whole warps.
__device__ __forceinline__ void publish(Bf16* hidden, const Cell& cell, float value, const Lane& lane) {
    const u32 pair = pair_of_bf16(value, __shfl_xor_sync(~0u, value, 4));
    const u32 next_pair = __shfl_xor_sync(~0u, pair, 8);
    if (cell.is_stored && (lane.row & 3) == 0)
        *reinterpret_cast<uint2*>(hidden + cell.padded()) = make_uint2(pair, next_pair);
}
__device__ __forceinline__ void publish(float* hidden, const Cell& cell, float value, const Lane&) {
    if (cell.is_stored) hidden[cell.padded()] = value;
}

// weights [PADDED units][4 gates][PADDED]; first_hidden, first_cell, last_cell [BATCH][HIDDEN];
// gates [steps][BATCH][PADDED][4]: products of the input with biases, replaced by the gates where `keep` is set;
// hidden [1 + steps][BATCH][PADDED], the first one being written here too; cells [steps][BATCH][PADDED] where `keep` is.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
lstm_forward(const Element* weights, const Element* first_hidden, const Element* first_cell, Element* gates,
             Element* hidden, float* cells, Element* last_cell, u32* counters, int* error, u64 patience_ns, int steps,
             int keep) {
    extern __shared__ uint4 shared[];
    float4* partials = reinterpret_cast<float4*>(shared + WEIGHT_BYTES / 16);
    float* own_cells = reinterpret_cast<float*>(shared + (WEIGHT_BYTES + PARTIAL_BYTES) / 16) + threadIdx.x;

    const Lane lane;
    const int first_unit = blockIdx.x % UNIT_BLOCKS * UNITS, group = blockIdx.x / UNIT_BLOCKS;
    constexpr size_t STATE = (size_t)BATCH * PADDED;
    counters += group * PASSES * COUNTER_STRIDE;
    Patience patience(error, patience_ns, 1);
    Weights matrix;
    matrix.load(shared, lane, weights, [&](int tile, int half) {
        const int unit = first_unit + 4 * tile + (lane.row & 3), gate = 2 * half + (lane.row >> 2);
        return unit < PADDED ? (unit * 4 + gate) * PADDED : -1;
    });

    for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
        for (int k = 0; k < TILES_PER_WARP; k++) {
            const Cell cell(first_unit, (pass * GROUPS + group) * COLUMNS, lane.warp + k * WARPS, lane);
            const bool is_real = cell.is_real;
            publish(hidden, cell, is_real ? Type<Element>::to_float(first_hidden[cell.unpadded()]) : 0.0f, lane);
            own_cells[(pass * TILES_PER_WARP + k) * THREADS] =
                is_real ? Type<Element>::to_float(first_cell[cell.unpadded()]) : 0.0f;
        }
    __syncthreads();
    if (threadIdx.x < PASSES) announce(counters + threadIdx.x * COUNTER_STRIDE);

    for (int step = 0; step < steps; step++) {
        Element* gates_now = gates + step * STATE * 4;
        for (int pass = 0; pass < PASSES; pass++) {
            const int first_column = (pass * GROUPS + group) * COLUMNS;
            if (first_column >= BATCH) break;  // the same for the whole CTA
            // Asked for before the wait, needed after the product.
            typename Type<Element>::Quad inputs[TILES_PER_WARP];
#pragma unroll
            for (int k = 0; k < TILES_PER_WARP; k++) {
                const Cell cell(first_unit, first_column, lane.warp + k * WARPS, lane);
                inputs[k] = typename Type<Element>::Quad();
                if (cell.is_real) inputs[k] = load_quad(gates_now + cell.padded() * 4);
            }
            patience.wait_until(counters + pass * COUNTER_STRIDE, (u32)(step + 1) * UNIT_BLOCKS);
            float4 sums[ROW_TILES][COLUMN_TILES];
            matrix.multiply(sums, lane, hidden + step * STATE, PADDED, first_column);
            put_partial_sums(partials, sums, lane);
            __syncthreads();

            float4 activated[TILES_PER_WARP];
#pragma unroll
            for (int k = 0; k < TILES_PER_WARP; k++) {
                const int tile = lane.warp + k * WARPS;
                if (tile >= TILES) break;  // the same for the whole warp
                const Cell cell(first_unit, first_column, tile, lane);
                const float4 sum = whole_sum(partials, tile, lane), input = Type<Element>::to_floats(inputs[k]);
                const bool is_upper = lane.row >= 4;
                const float first = __shfl_xor_sync(~0u, is_upper ? sum.x : sum.y, 16);
                const float second = __shfl_xor_sync(~0u, is_upper ? sum.z : sum.w, 16);
                const float i = sigmoid((is_upper ? first : sum.x) + input.x);
                const float f = sigmoid((is_upper ? sum.y : first) + input.y);
                const float g = hyperbolic_tangent((is_upper ? second : sum.z) + input.z);
                const float o = sigmoid((is_upper ? sum.w : second) + input.w);
                float& own_cell = own_cells[(pass * TILES_PER_WARP + k) * THREADS];
                const float c = f * own_cell + i * g;
                own_cell = c;
                // Padding stays zero even where the state is not finite: zero weights times infinity are NaN.
                const float h = cell.is_real ? o * hyperbolic_tangent(c) : 0.0f;
                publish(hidden + (step + 1) * STATE, cell, patience.or_nan(h), lane);
                activated[k] = make_float4(i, f, g, o);
            }
            // Also keeps the partial sums of the next pass out until these have been read.
            __syncthreads();
            if (threadIdx.x == 0) announce(counters + pass * COUNTER_STRIDE);
            if (keep) {  // only the backward pass reads these: they go out after the announcement
#pragma unroll
                for (int k = 0; k < TILES_PER_WARP; k++) {
                    const Cell cell(first_unit, first_column, lane.warp + k * WARPS, lane);
                    if (!cell.is_real) continue;
                    store_quad(gates_now + cell.padded() * 4, activated[k]);
                    cells[step * STATE + cell.padded()] = own_cells[(pass * TILES_PER_WARP + k) * THREADS];
                }
            }
        }
    }
    for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
        for (int k = 0; k < TILES_PER_WARP; k++) {
            const Cell cell(first_unit, (pass * GROUPS + group) * COLUMNS, lane.warp + k * WARPS, lane);
            if (cell.is_real)
                last_cell[cell.unpadded()] =
                    Type<Element>::from_float(own_cells[(pass * TILES_PER_WARP + k) * THREADS]);
        }
}
