// Element types, matrix instructions and activations. No header of CUDA is needed: NVRTC has everything built in.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct Bf16 {
    unsigned short bits;
};

__device__ __forceinline__ u32 pair_of_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// `1 - 2 / (1 + e^2x)` and the like: infinities saturate and NaN stays NaN, as in torch. The absolute error is 1e-7.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
}

// What depends on the type of weights and state. `Quad` holds four neighbouring elements: the gates i, f, g, o of a cell.
template <typename Element>
struct Type;

template <>
struct Type<Bf16> {
    typedef uint2 Quad;
    static __device__ __forceinline__ float to_float(Bf16 value) { return __uint_as_float((u32)value.bits << 16); }
    static __device__ __forceinline__ Bf16 from_float(float value) {
        Bf16 result;
        result.bits = (unsigned short)pair_of_bf16(value, 0.0f);
        return result;
    }
    static __device__ __forceinline__ float4 to_floats(Quad quad) {
        return make_float4(__uint_as_float(quad.x << 16), __uint_as_float(quad.x & 0xffff0000u),
                           __uint_as_float(quad.y << 16), __uint_as_float(quad.y & 0xffff0000u));
    }
    static __device__ __forceinline__ Quad from_floats(float4 v) {
        return make_uint2(pair_of_bf16(v.x, v.y), pair_of_bf16(v.z, v.w));
    }
    static __device__ __forceinline__ float as_operand(float value) { return value; }
    static __device__ __forceinline__ void multiply_add(float4& sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

// Products of float32 values in TF32: weights are rounded to nearest when they are
// packed, values are cut by the matrix unit.
template <>
struct Type<float> {
    typedef float4 Quad;
    static __device__ __forceinline__ float to_float(float value) { return value; }
    static __device__ __forceinline__ float from_float(float value) { return value; }
    static __device__ __forceinline__ float4 to_floats(Quad quad) { return quad; }
    static __device__ __forceinline__ Quad from_floats(float4 v) { return v; }
    static __device__ __forceinline__ float as_operand(float value) {
        u32 rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
        return __uint_as_float(rounded);
    }
    static __device__ __forceinline__ void multiply_add(float4& sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

template <typename Element>
__device__ __forceinline__ typename Type<Element>::Quad load_quad(const Element* at) {
    return __ldcg(reinterpret_cast<const typename Type<Element>::Quad*>(at));
}
template <typename Element>
__device__ __forceinline__ void store_quad(Element* at, float4 values) {
    *reinterpret_cast<typename Type<Element>::Quad*>(at) = Type<Element>::from_floats(values);
}
