// Frozen weights in 8 or 4 bits: the stored arrays of a parameter, quantization on the host, and a product that
// dequantizes them where they are used. Only weight matrices without gradient are stored this way. Sources:
// bitsandbytes, functional.py (quantize_4bit with compress_statistics, create_dynamic_map, the table of NF4).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/graph.h"

namespace md {

class ParamTable;
struct Param;

enum class FewBitsType { float8, int8, nf4 };

/// Settings of the keys base_weights_dtype and base_quantization_skip.
struct FewBits {
  FewBitsType type = FewBitsType::int8;
  std::vector<std::string> skip;  // parts of module paths; kOutsideBlocks

  /// Whether the matrix of a module is stored quantized. `dims`: [outputs, inputs]. Throws invalid_config if it is and
  /// its rows are not whole blocks.
  bool covers(const std::string& module, const std::vector<int64_t>& dims) const;
};
/// Value of base_quantization_skip for modules outside of numbered blocks: embeddings, first and last layers, timestep
/// embeddings.
inline constexpr const char* kOutsideBlocks = "outside_blocks";

/// Null for an empty name. Throws invalid_config, naming the key, unless the name is float8_e4m3fn, int8 or nf4.
std::shared_ptr<const FewBits> make_few_bits(const std::string& key, const std::string& name,
                                             const std::vector<std::string>& skip);

/// One of the arrays that a matrix is stored as, in order: values; then for float8 and int8 the scales of rows; for nf4
/// the largest magnitudes of blocks of 64 in 8 bits, the largest magnitudes of 256 of those, and the mean that was
/// subtracted.
struct FewBitsPart {
  FewBitsType type;
  size_t which;               // index of the array
  std::string weight;         // path of the weight
  std::vector<int64_t> dims;  // of one layer of the weight
};
struct FewBitsArray {
  const char* suffix;  // of the parameter's path
  Shape shape;
  bool rows;  // whether axis 0 is the matrix's
};
std::vector<FewBitsArray> few_bits_arrays(FewBitsType type, const std::vector<int64_t>& dims);

/// Dequantizes the arrays of a matrix to f32; few_bits_of quantizes. Rounds to the nearest value; ties in tables to the
/// lower one. A matrix is of any float type, and read once, by all cores.
HostArray widened(FewBitsType type, const std::vector<HostArray>& arrays);
std::vector<HostArray> few_bits_of(FewBitsType type, const HostArray& matrix);

/// f(x, the dequantized matrix), in x's type. The backward pass dequantizes the matrix again.
Tensor few_bits_product(FewBitsType type, const std::vector<int64_t>& dims, Tensor x, const std::vector<Tensor>& arrays,
                        const std::function<Tensor(Tensor, Tensor)>& f);

/// Whether the table has quantized parameters of a component.
bool has_few_bits(const ParamTable& params, const std::string& component);
/// The component's parameters before quantization: matrices in f32, under their own names.
ParamTable before_few_bits(const ParamTable& params, const std::string& component);
/// Quantized values of the component's parameters. `layer(path)`: values of one parameter of before_few_bits, or of one
/// layer of a stack, of any float type; called once for each, in sequence.
HostArrays few_bits_values(const ParamTable& params, const std::string& component,
                           const std::function<HostArray(const std::string& path)>& layer);
/// The same, from values by input name.
HostArrays few_bits_values(const ParamTable& params, const std::string& component, const HostArrays& before);

}  // namespace md
