// This program's interface to Arrow C++. Arrow's libraries are large, so the shared library that implements this
// interface (maxdiffusion/data/records/arrow/) is opened when first needed, and no other file includes their headers.
// Errors are md::Error, io, with the name of the file. Everything is thread safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/storage/storage.h"

namespace md {

/// One value of a table.
struct Cell {
  /// Text, bytes, or the elements of an array; empty for null.
  Blob bytes;
  std::string path;  // of a struct {bytes, path}, or of a text
  bool null = false, array = false;
  DType dtype = DType::u8;    // of the elements of an array
  std::vector<int64_t> dims;  // of an array; [] for a number
};

/// A group of rows that a file stores together.
class TableGroup {
 public:
  virtual ~TableGroup() = default;
  /// `column`: index into the requested columns. Throws io unless its type is text, bytes, a struct {bytes,
  /// path}, a list of texts (the first is used), a number, or a (nested) list of numbers.
  virtual Cell cell(size_t column, int64_t row) const = 0;
};

class Table {
 public:
  virtual ~Table() = default;
  virtual const std::vector<std::string>& columns() const = 0;
  /// "string", "struct<bytes: binary, path: string>", … by column.
  virtual const std::vector<std::string>& types() const = 0;
  /// Number of rows of each group.
  virtual const std::vector<int64_t>& groups() const = 0;
  /// Whether groups are memory-mapped from a local file: reading one costs nothing.
  virtual bool in_place() const = 0;
  virtual std::shared_ptr<const TableGroup> read(int64_t group, const std::vector<std::string>& columns) const = 0;
};

class ArrowLibrary {
 public:
  virtual ~ArrowLibrary() = default;
  /// A Parquet file, or an Arrow file (IPC format, stream or file).
  virtual std::shared_ptr<const Table> open_table(std::shared_ptr<const InputFile> file) const = 0;
  /// codec: "zstd", "brotli" or "snappy". `size`: bytes of the result.
  virtual std::string decompress(const std::string& codec, std::string_view bytes, int64_t size) const = 0;
};

/// Opens the library on first use. Throws io naming it.
const ArrowLibrary& arrow_library();

}  // namespace md
