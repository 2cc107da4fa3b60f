#include "maxdiffusion/base/temporary_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "maxdiffusion/base/error.h"

namespace md {

TemporaryFolder::TemporaryFolder(const std::string& parent) {
  path_ = ((parent.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(parent)) /
           "maxdiffusion-XXXXXX")
              .string();
  check(::mkdtemp(path_.data()) != nullptr, Code::io, "make temporary folder '{}': {}", path_, std::strerror(errno));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ec;
  std::filesystem::remove_all(path_, ec);
}

}  // namespace md
