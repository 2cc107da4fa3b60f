// tf.Examples: read as records, and written to TFRecord shards.
#include <cstring>
#include <filesystem>
#include <limits>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/data/records/example.pb.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/tfrecord_writer.h"
#include "maxdiffusion/storage/tfrecord.h"

namespace md {
namespace {

// TensorFlow's DataType numbers.
constexpr std::pair<int, DType> kTypes[] = {{1, DType::f32},   {2, DType::f64},  {3, DType::s32},  {4, DType::u8},
                                            {5, DType::s16},   {6, DType::s8},   {9, DType::s64},  {10, DType::pred},
                                            {14, DType::bf16}, {17, DType::u16}, {19, DType::f16}, {22, DType::u32},
                                            {23, DType::u64}};

/// Copies `values`; the last one is repeated for the remaining elements.
template <class T, class Values>
void fill(HostArray& to, const Values& values) {
  auto v = to.mutable_view<T>();
  for (size_t i = 0; i < v.size(); ++i) {
    const int last = values.size() - 1;
    v[i] = static_cast<T>(values[std::min(static_cast<int>(i), last)]);
  }
}

HostArray array_of(const example::Tensor& t, const std::string& what) {
  const auto type = std::ranges::find(kTypes, t.dtype(), &std::pair<int, DType>::first);
  check(type != std::end(kTypes), Code::io, "{}: a tensor of TensorFlow's type {}; expected numbers", what, t.dtype());
  Shape shape{type->second, {}};
  int64_t elements = 1;
  for (const auto& d : t.tensor_shape().dim()) {
    check(d.size() >= 0 && (d.size() == 0 || elements <= std::numeric_limits<int32_t>::max() / d.size()), Code::io,
          "{}: a tensor with {} on axis {}", what, d.size(), shape.rank());
    shape.dims.push_back(d.size());
    elements *= d.size();
  }
  HostArray a;
  const auto has = [&](int n) {
    check(n > 0 || elements == 0, Code::io, "{}: {} without values", what, to_string(shape));
    check(n <= elements, Code::io, "{}: {} with {} values", what, to_string(shape), n);
    a = HostArray(shape);
  };
  if (!t.tensor_content().empty()) {
    check(t.tensor_content().size() == static_cast<size_t>(shape.bytes()), Code::io, "{}: {} in {} bytes; expected {}",
          what, to_string(shape), t.tensor_content().size(), shape.bytes());
    has(static_cast<int>(elements));
    std::memcpy(a.mutable_data(), t.tensor_content().data(), a.bytes());
    return a;
  }
  switch (shape.dtype) {
    case DType::f32: return has(t.float_val_size()), fill<float>(a, t.float_val()), a;
    case DType::f64: return has(t.double_val_size()), fill<double>(a, t.double_val()), a;
    case DType::s32: return has(t.int_val_size()), fill<int32_t>(a, t.int_val()), a;
    case DType::s16: return has(t.int_val_size()), fill<int16_t>(a, t.int_val()), a;
    case DType::s8: return has(t.int_val_size()), fill<int8_t>(a, t.int_val()), a;
    case DType::u8: return has(t.int_val_size()), fill<uint8_t>(a, t.int_val()), a;
    case DType::u16: return has(t.int_val_size()), fill<uint16_t>(a, t.int_val()), a;
    case DType::s64: return has(t.int64_val_size()), fill<int64_t>(a, t.int64_val()), a;
    case DType::u32: return has(t.uint32_val_size()), fill<uint32_t>(a, t.uint32_val()), a;
    case DType::u64: return has(t.uint64_val_size()), fill<uint64_t>(a, t.uint64_val()), a;
    case DType::f16:
    case DType::bf16: return has(t.half_val_size()), fill<uint16_t>(a, t.half_val()), a;
    default: fail(Code::io, "{}: {} in an unknown encoding", what, to_string(shape));
  }
}

HostArray array_of(const example::Feature& f, const std::string& what) {
  if (f.has_float_list()) {
    const auto& v = f.float_list().value();
    return HostArray::of<float>({DType::f32, {v.size()}}, {v.data(), static_cast<size_t>(v.size())});
  }
  if (f.has_int64_list()) {
    const auto& v = f.int64_list().value();
    return HostArray::of<int64_t>({DType::s64, {v.size()}}, {v.data(), static_cast<size_t>(v.size())});
  }
  check(f.bytes_list().value_size() == 1, Code::io, "{}: {} values; expected one serialized tensor", what,
        f.bytes_list().value_size());
  example::Tensor t;
  check(t.ParseFromString(f.bytes_list().value(0)), Code::io, "{}: {} bytes; expected a serialized TensorProto", what,
        f.bytes_list().value(0).size());
  return array_of(t, what);
}

}  // namespace

Record record_of_example(std::string_view bytes, const DataSourceConfig& config, const std::string& name) {
  example::Example e;
  check(bytes.size() <= std::numeric_limits<int32_t>::max() &&
            e.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())),
        Code::io, "{}: {} bytes; expected a tf.Example", name, bytes.size());
  auto& features = *e.mutable_features()->mutable_feature();
  std::vector<std::string> columns;
  for (const auto& [key, value] : features) columns.push_back(key);
  std::ranges::sort(columns);
  const SelectedColumns w = selected_columns(config, columns, name);
  Record r{.name = name};
  if (!config.array_columns.empty()) {
    for (size_t i = 0; i < w.names.size(); ++i)
      r.arrays.emplace(w.keys[i], array_of(features.at(w.names[i]), fmt::format("{}: '{}'", name, w.names[i])));
    return r;
  }
  const auto bytes_of = [&](size_t i) {
    const auto* list = &features.at(w.names[i]).bytes_list();
    check(features.at(w.names[i]).kind_case() != example::Feature::kFloatList && list->value_size() <= 1, Code::io,
          "{}: '{}' holds {} values; expected one", name, w.names[i], list->value_size());
    return list->value_size() == 0 ? std::string() : list->value(0);
  };
  r.image = Blob::of(bytes_of(0));
  r.caption = decoded_text(bytes_of(1), fmt::format("{} '{}'", name, w.names[1]));
  if (r.image.bytes.empty()) r.fault = name + ": no image";
  for (size_t i = 2; i < w.names.size(); ++i) {
    r.references.push_back(Blob::of(bytes_of(i)));
    if (r.references.back().bytes.empty()) r.fault = fmt::format("{}: no image in '{}'", name, w.names[i]);
  }
  return r;
}

// --- writing

TfrecordShards::TfrecordShards(const std::string& folder, int64_t records_per_shard)
    : folder_(folder), records_per_shard_(records_per_shard) {
  namespace fs = std::filesystem;
  check(records_per_shard > 0, Code::invalid_config, "TFRecord files of {} records: expected at least 1",
        records_per_shard);
  check(!is_remote(folder), Code::io,
        "tfrecords_dir '{}': expected a local folder; copy the files to the bucket afterwards", shown(folder));
  while (folder_.size() > 1 && folder_.ends_with('/')) folder_.pop_back();
  std::error_code ec;
  check(!fs::exists(folder_, ec) || fs::is_empty(folder_, ec), Code::io,
        "tfrecords_dir '{}': not empty; expected a new folder", folder_);
  const fs::path path(folder_);
  hidden_ = (path.parent_path() / ("." + path.filename().string() + ".unfinished")).string();
  fs::remove_all(hidden_, ec);
  make_folders(hidden_);
}

TfrecordShards::~TfrecordShards() {
  writer_.reset();
  std::error_code ignored;
  if (!closed_) std::filesystem::remove_all(hidden_, ignored);
}

void TfrecordShards::add(const HostArrays& arrays, const std::map<std::string, int64_t>& numbers) {
  example::Example e;
  for (const auto& [name, a] : arrays) {
    const auto type = std::ranges::find(kTypes, a.dtype(), &std::pair<int, DType>::second);
    check(type != std::end(kTypes), Code::invalid_config, "TFRecord: '{}' is {}, a type that TensorFlow does not have",
          name, to_string(a.shape()));
    example::Tensor t;
    t.set_dtype(type->first);
    t.mutable_tensor_shape();
    for (int64_t d : a.dims()) t.mutable_tensor_shape()->add_dim()->set_size(d);
    t.set_tensor_content(a.data(), a.bytes());
    *(*e.mutable_features()->mutable_feature())[name].mutable_bytes_list()->add_value() = t.SerializeAsString();
  }
  for (const auto& [name, number] : numbers)
    (*e.mutable_features()->mutable_feature())[name].mutable_int64_list()->add_value(number);
  write(e.SerializeAsString());
}

void TfrecordShards::add(const std::map<std::string, std::string>& texts) {
  example::Example e;
  for (const auto& [name, text] : texts)
    *(*e.mutable_features()->mutable_feature())[name].mutable_bytes_list()->add_value() = text;
  write(e.SerializeAsString());
}

void TfrecordShards::write(const std::string& example) {
  check(!closed_, Code::internal, "TFRecord files in {} are closed", folder_);
  if (count_ % records_per_shard_ == 0) {
    if (writer_) writer_->close();
    writer_ = std::make_unique<FileWriter>(
        fmt::format("{}/file_{:02}-{}.tfrec", hidden_, count_ / records_per_shard_, count_ + records_per_shard_));
  }
  std::string frame;
  append_tfrecord(frame, example);
  writer_->write(frame.data(), frame.size());
  ++count_;
}

void TfrecordShards::close() {
  check(count_ > 0, Code::io, "tfrecords_dir '{}': no record to write", folder_);
  writer_->close();
  sync_folder(hidden_);
  rename_durable(hidden_, folder_);
  closed_ = true;
}

}  // namespace md
