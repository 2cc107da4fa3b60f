// Parquet files through libparquet, Arrow IPC files and streams message by message. Source of the message layout: the
// Arrow columnar format, "Encapsulated message format".
#include <arrow/api.h>
#include <arrow/io/memory.h>
#include <arrow/ipc/api.h>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "maxdiffusion/data/records/arrow/library.h"

namespace md {
namespace {

/// An InputFile as a file of Arrow's.
class FileOfInput : public arrow::io::RandomAccessFile {
 public:
  explicit FileOfInput(std::shared_ptr<const InputFile> file) : file_(std::move(file)) {
    set_mode(arrow::io::FileMode::READ);
  }
  arrow::Result<int64_t> GetSize() override { return file_->size(); }
  arrow::Result<int64_t> Tell() const override { return at_; }
  arrow::Status Seek(int64_t to) override {
    at_ = to;
    return arrow::Status::OK();
  }
  arrow::Result<std::shared_ptr<arrow::Buffer>> ReadAt(int64_t at, int64_t n) override {
    n = std::clamp<int64_t>(n, 0, std::max<int64_t>(file_->size() - at, 0));
    try {
      struct Held : arrow::Buffer {
        Blob blob;
        explicit Held(Blob b)
            : Buffer(reinterpret_cast<const uint8_t*>(b.bytes.data()), static_cast<int64_t>(b.bytes.size())),
              blob(std::move(b)) {}
      };
      return std::make_shared<Held>(file_->read(at, n));
    } catch (const Error& e) {
      return arrow::Status::IOError(e.message());
    }
  }
  arrow::Result<int64_t> ReadAt(int64_t at, int64_t n, void* out) override {
    ARROW_ASSIGN_OR_RAISE(auto buffer, ReadAt(at, n));
    std::memcpy(out, buffer->data(), static_cast<size_t>(buffer->size()));
    return buffer->size();
  }
  arrow::Result<int64_t> Read(int64_t n, void* out) override {
    ARROW_ASSIGN_OR_RAISE(n, ReadAt(at_, n, out));
    at_ += n;
    return n;
  }
  arrow::Result<std::shared_ptr<arrow::Buffer>> Read(int64_t n) override {
    ARROW_ASSIGN_OR_RAISE(auto buffer, ReadAt(at_, n));
    at_ += buffer->size();
    return buffer;
  }
  bool supports_zero_copy() const override { return file_->local(); }
  arrow::Status Close() override { return arrow::Status::OK(); }
  bool closed() const override { return false; }

 private:
  std::shared_ptr<const InputFile> file_;
  int64_t at_ = 0;
};

std::optional<DType> number_type(const arrow::DataType& t) {
  switch (t.id()) {
    case arrow::Type::FLOAT: return DType::f32;
    case arrow::Type::DOUBLE: return DType::f64;
    case arrow::Type::HALF_FLOAT: return DType::f16;
    case arrow::Type::INT8: return DType::s8;
    case arrow::Type::INT16: return DType::s16;
    case arrow::Type::INT32: return DType::s32;
    case arrow::Type::INT64: return DType::s64;
    case arrow::Type::UINT8: return DType::u8;
    case arrow::Type::UINT16: return DType::u16;
    case arrow::Type::UINT32: return DType::u32;
    case arrow::Type::UINT64: return DType::u64;
    default: return std::nullopt;
  }
}

/// The elements of a list at `row`: values and their offset; none for types that are not lists.
struct Elements {
  std::shared_ptr<arrow::Array> values;
  int64_t begin, count;
};
std::optional<Elements> elements(const arrow::Array& a, int64_t row) {
  if (a.type_id() == arrow::Type::LIST) {
    const auto& l = static_cast<const arrow::ListArray&>(a);
    return Elements{l.values(), l.value_offset(row), l.value_length(row)};
  }
  if (a.type_id() == arrow::Type::LARGE_LIST) {
    const auto& l = static_cast<const arrow::LargeListArray&>(a);
    return Elements{l.values(), l.value_offset(row), l.value_length(row)};
  }
  if (a.type_id() == arrow::Type::FIXED_SIZE_LIST) {
    const auto& l = static_cast<const arrow::FixedSizeListArray&>(a);
    return Elements{l.values(), l.value_offset(row), l.value_length(row)};
  }
  return std::nullopt;
}

class Group : public TableGroup {
 public:
  Group(std::shared_ptr<const InputFile> file, std::vector<std::string> names,
        std::vector<std::shared_ptr<arrow::Array>> columns)
      : file_(std::move(file)), names_(std::move(names)), columns_(std::move(columns)) {}

  Cell cell(size_t column, int64_t row) const override { return value(columns_[column], row, column); }

 private:
  [[noreturn]] void refuse(size_t column, const arrow::DataType& type, const char* why) const {
    fail(Code::io, "{}: column '{}' is {}: {}", file_->name(), names_[column], type.ToString(), why);
  }

  Cell value(std::shared_ptr<arrow::Array> a, int64_t row, size_t column) const {
    if (a->type_id() == arrow::Type::EXTENSION) a = static_cast<const arrow::ExtensionArray&>(*a).storage();
    if (a->IsNull(row)) return {.null = true};
    const auto text = [&](const auto& array) { return Cell{.bytes = {a, array.GetView(row)}}; };
    switch (a->type_id()) {
      case arrow::Type::STRING: return text(static_cast<const arrow::StringArray&>(*a));
      case arrow::Type::LARGE_STRING: return text(static_cast<const arrow::LargeStringArray&>(*a));
      case arrow::Type::BINARY: return text(static_cast<const arrow::BinaryArray&>(*a));
      case arrow::Type::LARGE_BINARY: return text(static_cast<const arrow::LargeBinaryArray&>(*a));
      case arrow::Type::FIXED_SIZE_BINARY: return text(static_cast<const arrow::FixedSizeBinaryArray&>(*a));
      case arrow::Type::DICTIONARY: {
        const auto& d = static_cast<const arrow::DictionaryArray&>(*a);
        return value(d.dictionary(), d.GetValueIndex(row), column);
      }
      case arrow::Type::STRUCT: {
        const auto& s = static_cast<const arrow::StructArray&>(*a);
        const auto bytes = s.GetFieldByName("bytes"), path = s.GetFieldByName("path");
        if (!bytes && !path) refuse(column, *a->type(), "expected a struct with bytes or path");
        Cell c = bytes ? value(bytes, row, column) : Cell{.null = true};
        if (path) c.path = value(path, row, column).bytes.bytes;
        c.null = c.null && c.path.empty();
        return c;
      }
      case arrow::Type::LIST:
      case arrow::Type::LARGE_LIST:
      case arrow::Type::FIXED_SIZE_LIST: {
        const Elements e = *elements(*a, row);
        const auto id = e.values->type_id();
        if (id == arrow::Type::STRING || id == arrow::Type::LARGE_STRING)
          return e.count > 0 ? value(e.values, e.begin, column) : Cell{.null = true};
        return array(a, row, 1, {}, column);
      }
      default:
        if (!number_type(*a->type())) refuse(column, *a->type(), "this type is not read");
        return array(a, row, 1, {}, column);
    }
  }

  /// Elements [begin, begin + count) of `a`: all elements of an array whose leading sizes are `dims`.
  Cell array(const std::shared_ptr<arrow::Array>& a, int64_t begin, int64_t count, std::vector<int64_t> dims,
             size_t column) const {
    for (int64_t i = begin; i < begin + count; ++i) {
      if (a->IsNull(i)) refuse(column, *a->type(), "an array holds a null");
    }
    if (const auto type = number_type(*a->type())) {
      if (count == 0) return {.array = true, .dtype = *type, .dims = std::move(dims)};
      const auto& data = *a->data();
      const size_t size = size_of(*type);
      const auto* from =
          reinterpret_cast<const char*>(data.buffers[1]->data()) + static_cast<size_t>(data.offset + begin) * size;
      return {.bytes = {a, {from, static_cast<size_t>(count) * size}}, .array = true, .dtype = *type, .dims = dims};
    }
    int64_t inner = -1, from = 0;
    std::shared_ptr<arrow::Array> values;
    for (int64_t i = begin; i < begin + count; ++i) {
      const auto e = elements(*a, i);
      if (!e) refuse(column, *a->type(), "expected (nested) lists of numbers");
      if (inner < 0) inner = e->count, from = e->begin, values = e->values;
      // Nested lists must be contiguous.
      if (e->count != inner || e->begin != from + (i - begin) * inner)
        refuse(column, *a->type(), "the lists of an array have different lengths");
    }
    if (!values) return {.array = true, .dims = {0}};
    dims.push_back(inner);
    return array(values, from, count * inner, std::move(dims), column);
  }

  std::shared_ptr<const InputFile> file_;
  std::vector<std::string> names_;
  std::vector<std::shared_ptr<arrow::Array>> columns_;
};

class TableBase : public Table {
 public:
  explicit TableBase(std::shared_ptr<const InputFile> file) : file_(std::move(file)) {}
  const std::vector<std::string>& columns() const override { return columns_; }
  const std::vector<std::string>& types() const override { return types_; }
  const std::vector<int64_t>& groups() const override { return groups_; }

 protected:
  void set_schema(const arrow::Schema& schema) {
    for (const auto& field : schema.fields()) {
      columns_.push_back(field->name());
      types_.push_back(field->type()->ToString());
    }
  }
  std::vector<int> indices(const std::vector<std::string>& names) const {
    std::vector<int> at;
    for (const std::string& n : names) {
      const auto it = std::ranges::find(columns_, n);
      check(it != columns_.end(), Code::internal, "{}: no column '{}'", file_->name(), n);
      at.push_back(static_cast<int>(it - columns_.begin()));
    }
    return at;
  }
  std::shared_ptr<const InputFile> file_;
  std::vector<std::string> columns_, types_;
  std::vector<int64_t> groups_;
};

class ParquetTable : public TableBase {
 public:
  explicit ParquetTable(std::shared_ptr<const InputFile> file) : TableBase(std::move(file)) {
    parquet::arrow::FileReaderBuilder builder;
    require(builder.Open(std::make_shared<FileOfInput>(file_)), file_->name());
    builder.memory_pool(arrow::system_memory_pool());
    reader_ = require(builder.Build(), file_->name());
    reader_->set_use_threads(false);
    std::shared_ptr<arrow::Schema> schema;
    require(reader_->GetSchema(&schema), file_->name());
    set_schema(*schema);
    const auto meta = reader_->parquet_reader()->metadata();
    for (int g = 0; g < meta->num_row_groups(); ++g) groups_.push_back(meta->RowGroup(g)->num_rows());
  }
  bool in_place() const override { return false; }
  std::shared_ptr<const TableGroup> read(int64_t group, const std::vector<std::string>& names) const override {
    const std::lock_guard lock(mutex_);
    // Parquet counts leaf columns: a struct has several.
    const auto& manifest = reader_->manifest();
    std::vector<int> leaves;
    for (int field : indices(names)) add_leaves(manifest.schema_fields[static_cast<size_t>(field)], leaves);
    std::shared_ptr<arrow::Table> table =
        require(reader_->ReadRowGroup(static_cast<int>(group), leaves), file_->name());
    check(table->num_rows() == groups_[static_cast<size_t>(group)], Code::io,
          "{}: row group {} has {} rows; expected {}", file_->name(), group, table->num_rows(),
          groups_[static_cast<size_t>(group)]);
    std::vector<std::shared_ptr<arrow::Array>> columns;
    for (const std::string& n : names) {
      const auto& chunks = table->GetColumnByName(n)->chunks();
      if (chunks.size() == 1) {
        columns.push_back(chunks[0]);
      } else {
        columns.push_back(require(arrow::Concatenate(chunks, arrow::system_memory_pool()), file_->name()));
      }
    }
    return std::make_shared<Group>(file_, names, std::move(columns));
  }

 private:
  static void add_leaves(const parquet::arrow::SchemaField& f, std::vector<int>& leaves) {
    if (f.column_index >= 0) leaves.push_back(f.column_index);
    for (const auto& child : f.children) add_leaves(child, leaves);
  }
  std::unique_ptr<parquet::arrow::FileReader> reader_;
  mutable std::mutex mutex_;
};

/// The few FlatBuffers fields that describe a message. Source: FlatBuffers' internals page.
struct Flat {
  std::string_view bytes;
  size_t at;
  template <class T>
  T get(size_t where, const std::string& name) const {
    check(where <= bytes.size() && sizeof(T) <= bytes.size() - where, Code::io, "{}: a message is damaged", name);
    T v;
    std::memcpy(&v, bytes.data() + where, sizeof v);
    return v;
  }
  /// Offset of field `id`, 0 if it is absent.
  size_t field(size_t id, const std::string& name) const {
    const size_t table = at - static_cast<size_t>(static_cast<int64_t>(get<int32_t>(at, name)));
    if (4 + 2 * id + 2 > get<uint16_t>(table, name)) return 0;
    const uint16_t offset = get<uint16_t>(table + 4 + 2 * id, name);
    return offset ? at + offset : 0;
  }
  Flat child(size_t where, const std::string& name) const { return {bytes, where + get<uint32_t>(where, name)}; }
};

class IpcTable : public TableBase {
 public:
  explicit IpcTable(std::shared_ptr<const InputFile> file) : TableBase(std::move(file)) {
    const std::string& name = file_->name();
    options_.memory_pool = arrow::system_memory_pool();
    options_.use_threads = false;
    int64_t at = file_->read(0, std::min<int64_t>(6, file_->size())).bytes == "ARROW1" ? 8 : 0;
    bool ended = false;
    while (at < file_->size()) {
      // A message's description follows two words, one in files before Arrow 0.15; a size of 0 ends the file.
      const auto word = [&](int64_t where) { return Flat{file_->read(where, 4).bytes, 0}.get<int32_t>(0, name); };
      int32_t size = word(at);
      const int64_t words = size == -1 ? 8 : 4;
      if (size == -1) size = word(at + 4);
      if (size == 0) {
        ended = true;
        break;
      }
      check(size > 0, Code::io, "{}: not an Arrow file, or damaged at byte {}", name, at);
      const Blob description = file_->read(at + words, size);
      const Flat root = Flat{description.bytes, 0}.child(0, name);
      const size_t kind_at = root.field(1, name), header_at = root.field(2, name), body_at = root.field(3, name);
      const int kind = kind_at ? root.get<uint8_t>(kind_at, name) : 0;
      const int64_t body = body_at ? root.get<int64_t>(body_at, name) : 0;
      const int64_t total = words + size + body;
      check(body >= 0 && body <= file_->size() - at - words - size, Code::io,
            "{}: the file is truncated: a message of {} bytes starts at byte {} of {}", name, total, at, file_->size());
      constexpr int kSchema = 1, kDictionary = 2, kRecordBatch = 3;
      check(kind != kDictionary, Code::io, "{}: dictionary-encoded columns; expected plain ones", name);
      check(kind == kSchema || kind == kRecordBatch, Code::io, "{}: a message of kind {} at byte {}", name, kind, at);
      check((kind == kSchema) == (schema_ == nullptr), Code::io, "{}: expected one schema, first of all", name);
      if (kind == kSchema) {
        const Blob message = file_->read(at, total);
        arrow::io::BufferReader reader(std::make_shared<arrow::Buffer>(message.bytes));
        schema_ = require(arrow::ipc::ReadSchema(&reader, &memo_), name);
        set_schema(*schema_);
      } else {
        const Flat batch = root.child(header_at, name);
        const size_t rows = batch.field(0, name);
        groups_.push_back(rows ? batch.get<int64_t>(rows, name) : 0);
        batches_.push_back({at, total});
        compressed_ = compressed_ || batch.field(3, name) != 0;
      }
      at += total;
    }
    check(schema_ != nullptr, Code::io, "{}: an Arrow file without a schema: it is empty or truncated", name);
    check(ended || at == file_->size(), Code::io, "{}: the file is truncated", name);
  }
  bool in_place() const override { return file_->local() && !compressed_; }
  std::shared_ptr<const TableGroup> read(int64_t group, const std::vector<std::string>& names) const override {
    const auto [at, size] = batches_[static_cast<size_t>(group)];
    FileOfInput input(file_);
    arrow::io::BufferReader reader(require(input.ReadAt(at, size), file_->name()));
    auto options = options_;
    options.included_fields = indices(names);
    arrow::ipc::DictionaryMemo memo;
    const auto message = require(arrow::ipc::ReadMessage(&reader), file_->name());
    check(message != nullptr, Code::io, "{}: no message at byte {}", file_->name(), at);
    const auto batch = require(arrow::ipc::ReadRecordBatch(*message, schema_, &memo, options), file_->name());
    require(batch->ValidateFull(), file_->name());  // includes the offsets of texts, which are read without checks
    std::vector<std::shared_ptr<arrow::Array>> columns;
    for (const std::string& n : names) columns.push_back(batch->GetColumnByName(n));
    return std::make_shared<Group>(file_, names, std::move(columns));
  }

 private:
  struct Place {
    int64_t at, size;
  };
  std::vector<Place> batches_;
  std::shared_ptr<arrow::Schema> schema_;
  arrow::ipc::DictionaryMemo memo_;
  arrow::ipc::IpcReadOptions options_ = arrow::ipc::IpcReadOptions::Defaults();
  bool compressed_ = false;
};

}  // namespace

std::shared_ptr<const Table> open_table_file(std::shared_ptr<const InputFile> file) {
  try {
    if (file->read(0, std::min<int64_t>(4, file->size())).bytes == "PAR1")
      return std::make_shared<ParquetTable>(std::move(file));
    return std::make_shared<IpcTable>(std::move(file));
  } catch (const parquet::ParquetException& e) {
    fail(Code::io, "{}", e.what());
  }
}

}  // namespace md
