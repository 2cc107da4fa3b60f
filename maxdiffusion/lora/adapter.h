// Kinds of adapters: what is trained next to a layer's frozen weight W, how the layer computes with it, and how a
// file's values change W. One file for each kind, adapter_NAME.cc, and one row in adapter.cc. Sources: PEFT 0.21 (names
// of the parameters, lora, dora, loha, lokr, ia3), LyCORIS 3.4 (names in kohya's layout, ia3 on weights, full).
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

class Adapter;

/// The layer that an adapter is for, and the numbers that say how large it is.
struct AdapterLayer {
  Dims dims;         // of its weight: [out, in] or [out, in, k, …]
  LogicalAxes axes;  // of the same
  int64_t rank = 4;
  int64_t factor = -1;          // lokr: decompose_factor
  bool decompose_both = false;  // lokr
  bool on_input = false;        // ia3: features of the input are scaled, not those of the result
};

/// A trained parameter of a layer, f32.
struct AdapterPart {
  std::string name;  // behind the layer's name, as PEFT has it: "lora_A.weight", "hada_w1_a"
  Dims dims;
  LogicalAxes axes;
  Init init;
};
/// Sizes of the parts by name.
using PartDims = std::map<std::string, Dims>;

/// A layer in a program.
struct AdapterCall {
  const Scope& before;  // the layer without an adapter
  const Weight& weight;
  Tensor x;
  const Product& f;
  double scale;                                          // alpha / rank
  std::function<std::map<std::string, Tensor>()> parts;  // by name; makes them, so it is called once
  std::function<Tensor(Tensor x)> drop_input;
  std::function<Tensor(Tensor h)> drop_rank;  // of [B, …, rank]; kept values are scaled
  std::function<Tensor(Tensor d)> drop_rows;  // of [out, …]; kept values stay
  std::function<Tensor(Tensor with, Tensor without)> drop_module;
};

/// What a file, or a training state, holds for one weight.
struct AdapterWeights {
  const Adapter* kind = nullptr;
  HostArrays parts;           // by AdapterPart's names; kMagnitude in any kind is DoRA's, on top of it
  double alpha = 0;           // the change is scaled by alpha / rank where there is a rank
  bool alpha_in_file = true;  // false: alpha is the rank
  int64_t factor = -1;        // lokr: decompose_factor that gives the sizes of the parts
  Dims weight_dims = {};      // of the weight
  bool has_bias = false;      // whether its layer has one
  PartDims dims() const;
  double scale() const;
};

/// Some rows of a weight in f32, as a matrix of `width` columns.
struct WeightRows {
  int64_t first, count, width;
  std::span<const float> values;
};

class Adapter {
 public:
  virtual ~Adapter() = default;
  /// The word of the key `adapter`.
  virtual std::string_view name() const = 0;
  /// Whether rank and alpha mean something.
  virtual bool has_rank() const { return true; }
  /// Which dropouts it has, in addition to that of whole modules.
  virtual bool drops_input() const { return true; }
  virtual bool drops_rank() const { return true; }

  virtual std::vector<AdapterPart> parts(const AdapterLayer& layer) const = 0;
  /// The layer's result.
  virtual Tensor forward(const AdapterCall& call) const = 0;

  /// Of alpha / rank; 0: the change is not scaled.
  virtual int64_t rank(const PartDims& parts) const = 0;
  /// Throws io naming sizes, unless the parts change a weight of `dims`.
  virtual void check_fits(const AdapterWeights& weights, const Dims& dims, const std::string& name) const = 0;
  /// Adds the change of the rows at scale 1, with alpha / rank, but without DoRA's magnitudes.
  virtual void add_change(const AdapterWeights& weights, const WeightRows& rows, std::span<float> sum) const = 0;

  /// A part, and what LyCORIS and kohya call it behind the layer's name.
  struct PartName {
    const char* name;
    const char* lycoris;
  };
  virtual std::vector<PartName> names() const = 0;
  /// LyCORIS' name of the method, in the metadata of its files.
  virtual std::string_view lycoris_algorithm() const { return name(); }
  /// PEFT's name of the method ("LOHA"); empty: PEFT has none.
  virtual std::string_view peft_type() const = 0;
  /// Parts as PEFT's and as LyCORIS' files hold them.
  virtual HostArrays for_peft(const AdapterWeights& weights) const;
  virtual HostArrays for_lycoris(const AdapterWeights& weights) const;
};

/// DoRA's part: the lengths of the weight's rows, [out] where it is trained; in AdapterWeights [out, 1, …], or
/// [1, in, 1, …] if a file has the lengths of columns.
inline constexpr const char* kMagnitude = "lora_magnitude_vector";

/// All kinds, lora first.
const std::vector<const Adapter*>& adapters();
/// Throws invalid_config with the list.
const Adapter& adapter_named(const std::string& name);
std::vector<std::string> adapter_names();

/// "….to_q.lora_A.weight" → "….to_q" and the part's name; empty names if the path is of no adapter's parameter.
struct AdapterPath {
  std::string layer, part;
  explicit operator bool() const { return !part.empty(); }
};
AdapterPath adapter_path(const std::string& parameter);

/// Adds `factor` times what the weights change of these rows: W' − W, where DoRA's W' is m·V/‖V‖ of V = W + ΔW.
/// `column_norms`: of V, where the magnitudes are those of columns; else empty.
void add_adapter_rows(const AdapterWeights& weights, double factor, const WeightRows& rows,
                      std::span<const float> column_norms, std::span<float> sum);
/// The change of a whole weight whose values do not matter to it; f32.
HostArray change_of(const AdapterWeights& weights, const Dims& dims);
/// out = a·b of f32 matrices [rows, inner] and [inner, columns].
void matrix_product(std::span<const float> a, std::span<const float> b, int64_t rows, int64_t inner, int64_t columns,
                    std::span<float> out);
/// Values of rows of an array, as a matrix of `width` columns; f32.
std::vector<float> float_rows(const HostArray& a, int64_t width, int64_t first, int64_t count);

/// y = f(x, W) + f(x, ΔW): kinds that make a matrix of the weight's size.
class AddedWeight : public Adapter {
 public:
  Tensor forward(const AdapterCall& call) const override;

 protected:
  /// [out, in, …] in f32, before alpha / rank.
  virtual Tensor change(const std::map<std::string, Tensor>& parts, const Dims& dims) const = 0;
};

}  // namespace md
