// For files of the library behind arrow_library.h only.
#pragma once

#include <arrow/buffer.h>
#include <arrow/io/interfaces.h>
#include <arrow/result.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/records/arrow_library.h"

namespace md {

/// Throws io "<name>: <what Arrow says>".
inline void require(const arrow::Status& s, const std::string& name) {
  check(s.ok(), Code::io, "{}: {}", name, s.ok() ? "" : s.message());
}
template <class T>
T require(arrow::Result<T> r, const std::string& name) {
  require(r.status(), name);
  return std::move(r).ValueUnsafe();
}

inline Blob blob(std::shared_ptr<arrow::Buffer> b) {
  const std::string_view bytes(*b);
  return {std::move(b), bytes};
}

std::shared_ptr<const Table> open_table_file(std::shared_ptr<const InputFile> file);

}  // namespace md
