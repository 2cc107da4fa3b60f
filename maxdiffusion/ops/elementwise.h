// Elementwise operations. Two tensors must agree in shape and dtype, except that a side broadcasts by NumPy's rule
// (sizes of 1 and missing leading axes). A number takes the tensor's dtype. Source: StableHLO specification.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

Tensor add(Tensor a, Tensor b);
Tensor sub(Tensor a, Tensor b);
Tensor mul(Tensor a, Tensor b);
Tensor div(Tensor a, Tensor b);
Tensor rem(Tensor a, Tensor b);  // sign of the dividend
Tensor pow(Tensor a, Tensor b);
Tensor maximum(Tensor a, Tensor b);  // at a tie the gradient is split evenly
Tensor minimum(Tensor a, Tensor b);
Tensor atan2(Tensor y, Tensor x);
Tensor bit_and(Tensor a, Tensor b);  // integers and pred
Tensor bit_or(Tensor a, Tensor b);
Tensor bit_xor(Tensor a, Tensor b);
Tensor bit_not(Tensor a);
Tensor shift_left(Tensor a, Tensor b);
Tensor shift_right_logical(Tensor a, Tensor b);

Tensor neg(Tensor x);
Tensor abs(Tensor x);
Tensor sign(Tensor x);
Tensor exp(Tensor x);
Tensor expm1(Tensor x);
Tensor log(Tensor x);
Tensor log1p(Tensor x);
Tensor sqrt(Tensor x);
Tensor rsqrt(Tensor x);
Tensor sin(Tensor x);
Tensor cos(Tensor x);
Tensor tanh(Tensor x);
Tensor sigmoid(Tensor x);
Tensor erf(Tensor x);
Tensor erf_inv(Tensor x);
Tensor floor(Tensor x);
Tensor ceil(Tensor x);
Tensor round(Tensor x);      // half to even; gradient zero
Tensor is_finite(Tensor x);  // pred
Tensor square(Tensor x);
Tensor clamp(Tensor x, double low, double high);

/// Elementwise conversion; to itself it is the identity (no node). Floats round to nearest even.
/// Gradient: the cotangent cast back.
Tensor cast(Tensor x, DType to);
/// Whether x is the result of cast().
bool is_cast(Tensor x);
/// The same bits as another type of the same size.
Tensor bitcast(Tensor x, DType to);

/// pred of the broadcast shape.
Tensor eq(Tensor a, Tensor b);
Tensor ne(Tensor a, Tensor b);
Tensor lt(Tensor a, Tensor b);
Tensor le(Tensor a, Tensor b);
Tensor gt(Tensor a, Tensor b);
Tensor ge(Tensor a, Tensor b);
/// where(c, a, b): a where c, else b; all broadcast.
Tensor where(Tensor c, Tensor a, Tensor b);

/// The identity, without a gradient.
Tensor stop_gradient(Tensor x);
/// The identity; the node carries `name` for remat policies.
Tensor named(Tensor x, std::string name);

/// Memory kinds of a device.
enum class Memory { device, host };
/// The identity; the result is stored in this memory. No effect on CPUs, which is logged once.
Tensor place(Tensor x, Memory memory);
/// An optimization barrier: the compiler moves no computation across.
std::vector<Tensor> optimization_barrier(const std::vector<Tensor>& xs);

// Activations (composites).
Tensor relu(Tensor x);
Tensor silu(Tensor x);        // x·sigmoid(x)
Tensor gelu(Tensor x);        // exact: x·(1 + erf(x/√2))/2
Tensor gated_gelu(Tensor x);  // GEGLU: a·gelu(g), for the halves a and g of the last axis
Tensor gelu_tanh(Tensor x);   // tanh approximation
Tensor quick_gelu(Tensor x);  // x·sigmoid(1.702 x)

// Constants. `full_like` and friends take graph, shape and dtype of x.
Tensor constant(Graph& g, double value, DType dtype = DType::f32);  // scalar
Tensor full(Graph& g, double value, Shape shape);
Tensor full_like(Tensor x, double value);
Tensor zeros_like(Tensor x);
/// The value of a constant that `constant` or `full` created; none for other tensors.
std::optional<double> splat_value(Tensor x);
/// Values of a table; bytes are printed into the program, so keep it small.
Tensor constant(Graph& g, const HostArray& values);
/// 0, 1, 2, … along `axis`.
Tensor iota(Graph& g, Shape shape, int64_t axis);

inline Tensor operator+(Tensor a, Tensor b) { return add(a, b); }
inline Tensor operator-(Tensor a, Tensor b) { return sub(a, b); }
inline Tensor operator*(Tensor a, Tensor b) { return mul(a, b); }
inline Tensor operator/(Tensor a, Tensor b) { return div(a, b); }
inline Tensor operator-(Tensor a) { return neg(a); }
/// A scalar of x's dtype.
inline Tensor scalar_like(Tensor x, double v) { return constant(x.graph(), v, x.dtype()); }
inline Tensor operator+(Tensor a, double b) { return add(a, scalar_like(a, b)); }
inline Tensor operator-(Tensor a, double b) { return sub(a, scalar_like(a, b)); }
inline Tensor operator*(Tensor a, double b) { return mul(a, scalar_like(a, b)); }
inline Tensor operator/(Tensor a, double b) { return div(a, scalar_like(a, b)); }
inline Tensor operator+(double a, Tensor b) { return add(scalar_like(b, a), b); }
inline Tensor operator-(double a, Tensor b) { return sub(scalar_like(b, a), b); }
inline Tensor operator*(double a, Tensor b) { return mul(scalar_like(b, a), b); }
inline Tensor operator/(double a, Tensor b) { return div(scalar_like(b, a), b); }

}  // namespace md
