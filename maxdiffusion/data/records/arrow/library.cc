// Implementation of arrow_library.h.
#include "maxdiffusion/data/records/arrow/library.h"

#include <arrow/util/compression.h>

namespace md {
namespace {

class Library : public ArrowLibrary {
 public:
  std::shared_ptr<const Table> open_table(std::shared_ptr<const InputFile> file) const override {
    return open_table_file(std::move(file));
  }
  std::string decompress(const std::string& codec, std::string_view bytes, int64_t size) const override {
    const auto type = require(arrow::util::Codec::GetCompressionType(codec), codec);
    auto c = require(arrow::util::Codec::Create(type), codec);
    std::string out(static_cast<size_t>(size), '\0');
    const int64_t n =
        require(c->Decompress(static_cast<int64_t>(bytes.size()), reinterpret_cast<const uint8_t*>(bytes.data()), size,
                              reinterpret_cast<uint8_t*>(out.data())),
                codec);
    check(n == size, Code::io, "{}: decompressed to {} bytes; expected {}", codec, n, size);
    return out;
  }
};

}  // namespace
}  // namespace md

extern "C" const md::ArrowLibrary* md_arrow_library() { return new md::Library; }
