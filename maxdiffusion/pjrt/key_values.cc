#include "maxdiffusion/pjrt/key_values.h"

#include "maxdiffusion/base/files.h"

namespace md::pjrt {
namespace {

class FilesOfFolder final : public KeyValues {
 public:
  explicit FilesOfFolder(std::string folder) : folder_(std::move(folder)) { make_folders(folder_); }
  void put(const std::string& key, const std::string& value) override { write_file_atomic(file_of(key), value); }
  std::optional<std::string> get(const std::string& key) override {
    const std::string file = file_of(key);
    if (!exists(file)) return {};
    return read_file(file);
  }

 private:
  /// Keys may hold anything, and be of any length.
  std::string file_of(const std::string& key) const { return folder_ + "/" + content_hash(key); }
  std::string folder_;
};

}  // namespace

std::shared_ptr<KeyValues> key_values_in(const std::string& folder) { return std::make_shared<FilesOfFolder>(folder); }

}  // namespace md::pjrt
