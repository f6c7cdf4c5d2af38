// From the parameters of a layer to the matrices of the recurrence, and from their gradients back.
//
// Parameters are float32 with rows gate by gate, as torch has them. The recurrence wants the four gates of a unit next to
// each other, rows and columns padded with zeros, in the element type, and besides the recurrent matrix its transpose.
#include "numerics.cuh"
#include "plan.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 64;
constexpr int ROWS = 4 * PADDED;
constexpr int TILES_DOWN = (ROWS + TILE - 1) / TILE, TILES_ACROSS = (PADDED + TILE - 1) / TILE;

__device__ __forceinline__ void store_pair(Bf16* at, float first, float second) {
    *reinterpret_cast<u32*>(at) = pair_of_bf16(first, second);
}
__device__ __forceinline__ void store_pair(float* at, float first, float second) {
    *reinterpret_cast<float2*>(at) = make_float2(first, second);
}

// An interleaved row is unit * 4 + gate. The row of the parameter, or -1 for padding.
__device__ __forceinline__ int parameter_row(int row) {
    return row / 4 < HIDDEN ? row % 4 * HIDDEN + row / 4 : -1;
}

// weight_hh [4 HIDDEN][HIDDEN], of which weight drop leaves `kept`, where that is not null, times `scale`, becomes
// recurrent [ROWS][PADDED] and transpose [PADDED][ROWS], where that is not null. One tile of TILE by TILE.
__device__ __forceinline__ void pack_recurrent_tile(const float* weight_hh, const unsigned char* kept, float scale,
                                                    Element* recurrent, Element* transpose, int first_row,
                                                    int first_column) {
    __shared__ float tile[TILE][TILE + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int r = warp; r < TILE; r += WARPS) {
        const int source = first_row + r < ROWS ? parameter_row(first_row + r) : -1;
#pragma unroll
        for (int c = lane; c < TILE; c += 32) {
            const int column = first_column + c;
            float value = 0.0f;
            if (source >= 0 && column < HIDDEN) {
                const size_t at = (size_t)source * HIDDEN + column;
                value = weight_hh[at];
                // A dropped weight is multiplied by 0, as torch does it: NaN and infinity do not disappear.
                if (kept != nullptr) value *= kept[at] ? scale : 0.0f;
            }
            tile[r][c] = Type<Element>::as_operand(value);
        }
    }
    __syncthreads();
    for (int r = warp; r < TILE; r += WARPS)
        if (first_row + r < ROWS && first_column + 2 * lane < PADDED)
            store_pair(recurrent + (size_t)(first_row + r) * PADDED + first_column + 2 * lane, tile[r][2 * lane],
                       tile[r][2 * lane + 1]);
    if (transpose == nullptr) return;
    for (int c = warp; c < TILE; c += WARPS)
        if (first_column + c < PADDED && first_row + 2 * lane < ROWS)
            store_pair(transpose + (size_t)(first_column + c) * ROWS + first_row + 2 * lane, tile[2 * lane][c],
                       tile[2 * lane + 1][c]);
}

// weight_ih [4 HIDDEN][inputs] and the sum of the biases become input [ROWS][padded_inputs]: the biases are the weights
// of one more input, which is always 1. One row.
__device__ __forceinline__ void pack_input_row(const float* weight_ih, const float* bias_ih, const float* bias_hh,
                                               Element* input, int row, int inputs, int padded_inputs) {
    const int source = parameter_row(row);
    for (int column = 2 * threadIdx.x; column < padded_inputs; column += 2 * THREADS) {
        float values[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (source < 0) continue;
            if (column + k < inputs) values[k] = weight_ih[(size_t)source * inputs + column + k];
            if (column + k == inputs) values[k] = bias_ih[source] + bias_hh[source];
        }
        store_pair(input + (size_t)row * padded_inputs + column, values[0], values[1]);
    }
}

// A block for each tile of the recurrent matrix, then one for each row of the input's. Counters begin at zero.
extern "C" __global__ void __launch_bounds__(THREADS)
pack_weights(const float* weight_hh, const unsigned char* kept, float scale, const float* weight_ih,
             const float* bias_ih, const float* bias_hh, Element* recurrent, Element* transpose, Element* input,
             int inputs, int padded_inputs, u32* counters, int counter_count) {
    const int tile = blockIdx.x, row = tile - TILES_DOWN * TILES_ACROSS;
    if (row < 0)
        pack_recurrent_tile(weight_hh, kept, scale, recurrent, transpose, tile / TILES_ACROSS * TILE,
                            tile % TILES_ACROSS * TILE);
    else
        pack_input_row(weight_ih, bias_ih, bias_hh, input, row, inputs, padded_inputs);
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < counter_count; i += THREADS) counters[i] = 0;
}

// The way back, in float32: gradients of the packed matrices to those of the parameters. A block for each row of these.
extern "C" __global__ void __launch_bounds__(THREADS)
unpack_gradients(const float* recurrent, const float* input, const unsigned char* kept, float scale, float* weight_hh,
                 float* weight_ih, float* bias_ih, float* bias_hh, int inputs, int padded_inputs) {
    const int row = blockIdx.x, source = row % HIDDEN * 4 + row / HIDDEN;
    for (int column = threadIdx.x; column < HIDDEN; column += THREADS) {
        const size_t at = (size_t)row * HIDDEN + column;
        float value = recurrent[(size_t)source * PADDED + column];
        if (kept != nullptr) value *= kept[at] ? scale : 0.0f;
        weight_hh[at] = value;
    }
    const float* from = input + (size_t)source * padded_inputs;
    for (int column = threadIdx.x; column < inputs; column += THREADS) weight_ih[(size_t)row * inputs + column] = from[column];
    if (threadIdx.x == 0) bias_ih[row] = bias_hh[row] = from[inputs];
}

// target[r][c] = source[r][c] * mask[r % BATCH][c] for the first `columns` of a row, then 1, then zeros up to
// `target_stride`: the locked mask of a layer's input on the way in, which appends the input of the biases, and of its
// gradient on the way out, where the stride leaves no room for that. A block for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
mask_rows(const Element* source, const Element* mask, Element* target, int columns, int source_stride,
          int target_stride) {
    const Element* from = source + (size_t)blockIdx.x * source_stride;
    Element* to = target + (size_t)blockIdx.x * target_stride;
    const Element* factors = mask == nullptr ? nullptr : mask + (size_t)(blockIdx.x % BATCH) * columns;
    for (int column = threadIdx.x; column < target_stride; column += THREADS) {
        float value = column == columns ? 1.0f : 0.0f;
        if (column < columns)
            value = Type<Element>::to_float(from[column]) *
                    (factors == nullptr ? 1.0f : Type<Element>::to_float(factors[column]));
        to[column] = Type<Element>::from_float(value);
    }
}
