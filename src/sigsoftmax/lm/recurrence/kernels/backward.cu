// The backward recurrence of one LSTM layer over a window, in one launch: from the gradients of the outputs to those of
// the four gates before their activation, which all other gradients are products of.
//
// The grid is GROUPS times CLUSTERS clusters of four CTAs. A cluster owns 16 * ROW_TILES units; each of its CTAs
// multiplies a quarter of the inner dimension, which is four gates long, for all units of the cluster, sends the sums to
// the CTA that owns the units (a quarter of them each) through distributed shared memory, and finishes its own units.
#include "exchange.cuh"
#include "products.cuh"

constexpr int RANKS = 4;              // CTAs of a cluster
constexpr int UNITS = 4 * ROW_TILES;  // of a CTA
constexpr int CLUSTERS = (PADDED + RANKS * UNITS - 1) / (RANKS * UNITS);
constexpr int CELLS = UNITS * COLUMNS;  // of a CTA and a pass
constexpr int CELLS_PER_THREAD = (CELLS + THREADS - 1) / THREADS;
constexpr int SUM_BYTES = 2 * RANKS * CELLS * 4;
constexpr int CELL_BYTES = PASSES * CELLS_PER_THREAD * THREADS * 4;
static_assert(SHARED_BYTES == WEIGHT_BYTES + PARTIAL_BYTES + SUM_BYTES + CELL_BYTES, "the planner counts as the kernel does");
static_assert(CTAS == GROUPS * CLUSTERS * RANKS, "the planner counts as the kernel does");

__device__ __forceinline__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `own` is an address in this CTA's shared memory; the value goes to the same place of another CTA of the cluster.
__device__ __forceinline__ void store_at_rank(float* own, int rank, float value) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

struct Cell {
    int unit, column;
    bool is_real, is_stored;  // one of the model's; one of the padded buffers'

    __device__ __forceinline__ Cell(int first_unit, int first_column, int index)
        : unit(first_unit + index % UNITS),
          column(first_column + index / UNITS),
          is_real(index < CELLS && unit < HIDDEN && column < BATCH),
          is_stored(index < CELLS && unit < PADDED && column < BATCH) {}
    __device__ __forceinline__ size_t padded() const { return (size_t)column * PADDED + unit; }
    __device__ __forceinline__ size_t unpadded() const { return (size_t)column * HIDDEN + unit; }
};

// weights [PADDED][PADDED units][4 gates], the transpose of the forward one; gates, cells and first_cell as the forward
// pass has them; output_gradient [steps][BATCH][HIDDEN], with strides; gate_gradients [steps][BATCH][PADDED][4];
// last_cell_gradient and first_cell_gradient [BATCH][HIDDEN], or null.
extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS, 1)
lstm_backward(const Element* weights, const Element* gates, const float* cells, const Element* first_cell,
              const Element* output_gradient, const Element* last_cell_gradient, Element* gate_gradients,
              Element* first_cell_gradient, u32* counters, int* error, u64 patience_ns, u64 step_stride,
              u64 column_stride, int steps) {
    extern __shared__ uint4 shared[];
    float4* partials = reinterpret_cast<float4*>(shared + WEIGHT_BYTES / 16);
    float* rank_sums = reinterpret_cast<float*>(shared + (WEIGHT_BYTES + PARTIAL_BYTES) / 16);  // [2][rank][CELLS]
    float* own_gradients = rank_sums + SUM_BYTES / 4 + threadIdx.x;  // of the cell states

    const Lane lane;
    const int rank = blockIdx.x % RANKS, cluster = blockIdx.x / RANKS % CLUSTERS, group = blockIdx.x / (RANKS * CLUSTERS);
    const int cluster_unit = cluster * RANKS * UNITS, first_unit = cluster_unit + rank * UNITS;
    constexpr size_t STATE = (size_t)BATCH * PADDED;
    counters += group * PASSES * COUNTER_STRIDE;
    Patience patience(error, patience_ns, 2);
    Weights matrix;
    matrix.load(shared, lane, weights, [&](int tile, int half) {
        const int unit = cluster_unit + 16 * tile + 8 * half + lane.row;
        return unit < PADDED ? (unit * 4 + rank) * PADDED : -1;
    });

    for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
        for (int k = 0; k < CELLS_PER_THREAD; k++) {
            const Cell cell(first_unit, (pass * GROUPS + group) * COLUMNS, threadIdx.x + k * THREADS);
            own_gradients[(pass * CELLS_PER_THREAD + k) * THREADS] =
                cell.is_real && last_cell_gradient != nullptr
                    ? Type<Element>::to_float(last_cell_gradient[cell.unpadded()]) : 0.0f;
        }
    synchronize_cluster();  // nobody writes to the shared memory of a CTA that has not begun

    int parity = 0;  // of the buffer for the sums of the ranks: the other one may still be read
    for (int step = steps - 1; step >= 0; step--)
        for (int pass = 0; pass < PASSES; pass++) {
            const int first_column = (pass * GROUPS + group) * COLUMNS;
            if (first_column >= BATCH) break;  // the same for the whole cluster
            // Asked for before the wait, needed after the product.
            typename Type<Element>::Quad activated[CELLS_PER_THREAD];
            float c_now[CELLS_PER_THREAD], c_before[CELLS_PER_THREAD], h_gradient[CELLS_PER_THREAD];
#pragma unroll
            for (int k = 0; k < CELLS_PER_THREAD; k++) {
                const Cell cell(first_unit, first_column, threadIdx.x + k * THREADS);
                activated[k] = typename Type<Element>::Quad();
                c_now[k] = c_before[k] = h_gradient[k] = 0.0f;
                if (cell.is_real) {
                    const size_t at = step * STATE + cell.padded();
                    activated[k] = load_quad(gates + at * 4);
                    c_now[k] = __ldcg(cells + at);
                    c_before[k] = step > 0 ? __ldcg(cells + at - STATE)
                                           : Type<Element>::to_float(first_cell[cell.unpadded()]);
                    h_gradient[k] = Type<Element>::to_float(
                        output_gradient[step * step_stride + cell.column * column_stride + cell.unit]);
                }
            }
            float* sums_now = rank_sums + parity * RANKS * CELLS;
            parity ^= 1;
            if (step < steps - 1) {
                patience.wait_until(counters + pass * COUNTER_STRIDE, (u32)(steps - 1 - step) * CLUSTERS * RANKS);
                float4 sums[ROW_TILES][COLUMN_TILES];
                matrix.multiply(sums, lane, gate_gradients + (step + 1) * STATE * 4 + rank * PADDED, PADDED * 4,
                                first_column);
                put_partial_sums(partials, sums, lane);
                __syncthreads();
#pragma unroll
                for (int k = 0; k < TILES_PER_WARP; k++) {
                    const int tile = lane.warp + k * WARPS;
                    if (tile >= TILES) break;
                    const float4 sum = whole_sum(partials, tile, lane);
                    const int column = 8 * (tile % COLUMN_TILES) + 2 * lane.quad;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int unit = 16 * (tile / COLUMN_TILES) + 8 * half + lane.row;  // of the cluster
                        float* at = sums_now + rank * CELLS + column * UNITS + unit % UNITS;
                        store_at_rank(at, unit / UNITS, half ? sum.z : sum.x);
                        store_at_rank(at + UNITS, unit / UNITS, half ? sum.w : sum.y);
                    }
                }
                synchronize_cluster();
            }
#pragma unroll
            for (int k = 0; k < CELLS_PER_THREAD; k++) {
                const int index = threadIdx.x + k * THREADS;
                const Cell cell(first_unit, first_column, index);
                if (!cell.is_stored) continue;
                float dh = patience.or_nan(h_gradient[k]);
                if (step < steps - 1)
                    dh += (sums_now[index] + sums_now[CELLS + index]) +
                          (sums_now[2 * CELLS + index] + sums_now[3 * CELLS + index]);
                const float4 gate = Type<Element>::to_floats(activated[k]);
                const float i = gate.x, f = gate.y, g = gate.z, o = gate.w, tanh_c = hyperbolic_tangent(c_now[k]);
                float& own_gradient = own_gradients[(pass * CELLS_PER_THREAD + k) * THREADS];
                const float dc = own_gradient + dh * o * (1.0f - tanh_c * tanh_c);
                own_gradient = dc * f;
                float4 gradients = make_float4(dc * g * i * (1.0f - i), dc * c_before[k] * f * (1.0f - f),
                                               dc * i * (1.0f - g * g), dh * tanh_c * o * (1.0f - o));
                // Padding stays zero even where a gradient is not finite: zero weights times infinity are NaN.
                if (!cell.is_real) gradients = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                store_quad(gate_gradients + (step * STATE + cell.padded()) * 4, gradients);
            }
            __syncthreads();
            if (threadIdx.x == 0) announce(counters + pass * COUNTER_STRIDE);
        }
    if (first_cell_gradient != nullptr)
        for (int pass = 0; pass < PASSES; pass++)
#pragma unroll
            for (int k = 0; k < CELLS_PER_THREAD; k++) {
                const Cell cell(first_unit, (pass * GROUPS + group) * COLUMNS, threadIdx.x + k * THREADS);
                if (cell.is_real)
                    first_cell_gradient[cell.unpadded()] =
                        Type<Element>::from_float(own_gradients[(pass * CELLS_PER_THREAD + k) * THREADS]);
            }
    synchronize_cluster();  // nobody leaves while others may still write to its shared memory
}
