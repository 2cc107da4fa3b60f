#include "maxdiffusion/base/installation.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace md {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// The folder of the program's file; its parent is the prefix of an installation, or the checkout of a build.
const fs::path& program_folder() {
  static const fs::path folder = [] {
    std::error_code ignored;
    return fs::read_symlink("/proc/self/exe", ignored).parent_path();
  }();
  return folder;
}

/// The run path of the program (its RPATH), which names PREFIX/lib/maxdiffusion relative to the program.
std::vector<fs::path> run_path() {
  std::vector<fs::path> folders;
  void* self = ::dlopen(nullptr, RTLD_NOW);
  if (self == nullptr) return folders;
  Dl_serinfo size{};
  if (::dlinfo(self, RTLD_DI_SERINFOSIZE, &size) == 0) {
    std::vector<char> memory(size.dls_size);
    auto* info = reinterpret_cast<Dl_serinfo*>(memory.data());
    ::dlinfo(self, RTLD_DI_SERINFOSIZE, info);
    if (::dlinfo(self, RTLD_DI_SERINFO, info) == 0)
      for (unsigned i = 0; i < info->dls_cnt; ++i)
        folders.push_back(fs::path(info->dls_serpath[i].dls_name).lexically_normal());
  }
  ::dlclose(self);
  return folders;
}

/// Folders of this project's libraries: the program's folder, and its run path.
const std::vector<fs::path>& part_folders() {
  static const std::vector<fs::path> folders = [] {
    std::vector<fs::path> all = run_path();
    all.insert(all.begin(), program_folder());
    return all;
  }();
  return folders;
}

/// PREFIX/lib*/python3*/{site,dist}-packages, newest Python first, and PREFIX itself, which `pip install --target`
/// fills.
void add_python_packages(const fs::path& prefix, std::vector<std::string>& folders) {
  std::vector<std::pair<int, std::string>> found;
  for (const char* lib : {"lib", "lib64"}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(prefix / lib, ignored)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("python3")) continue;
      const int minor = name.starts_with("python3.") ? std::atoi(name.c_str() + 8) : 0;
      for (const char* packages : {"site-packages", "dist-packages"})
        if (is_there(entry.path() / packages)) found.emplace_back(minor, (entry.path() / packages).string());
    }
  }
  std::ranges::stable_sort(found, [](const auto& a, const auto& b) { return a.first > b.first; });
  for (auto& [minor, folder] : found) folders.push_back(std::move(folder));
  folders.push_back(prefix.string());
}

}  // namespace

const std::string& program_name() {
  static const std::string name = [] {
    const char* started_as = std::getenv("MAXDIFFUSION_STARTED_AS");
    return std::string(started_as && *started_as ? started_as : "maxdiffusion");
  }();
  return name;
}

std::string part_file(const std::string& name) {
  for (const fs::path& folder : part_folders())
    if (is_there(folder / name)) return (folder / name).string();
  return name;
}

std::string shipped_file(const std::string& name) {
  const fs::path prefix = program_folder().parent_path();
  for (const fs::path& file : {prefix / "share/maxdiffusion" / name, prefix / name})
    if (is_there(file)) return file.string();
  return "";
}

std::string shipped_file_or(const std::string& name, const std::vector<std::string>& others) {
  if (std::string file = shipped_file(name); !file.empty()) return file;
  const auto found = std::ranges::find_if(others, [](const std::string& other) { return is_there(other); });
  return found == others.end() ? others.front() : *found;
}

const std::vector<std::string>& wheel_folders() {
  static const std::vector<std::string> folders = [] {
    std::vector<std::string> all;
    const fs::path prefix = program_folder().parent_path();
    if (is_there(prefix / "share/maxdiffusion")) all.push_back((prefix / "share/maxdiffusion").string());
    for (const fs::path& folder : part_folders()) {
      if (folder.filename() == "maxdiffusion") all.push_back(folder.string());
      std::string wheels;
      std::ifstream file(folder / "wheels.path");  // written where the program is built
      if (std::getline(file, wheels) && !wheels.empty()) all.push_back(wheels);
    }
    add_python_packages(prefix, all);
    for (const char* other : {"/usr/local", "/usr"}) add_python_packages(other, all);
    std::vector<std::string> once;
    for (const std::string& folder : all)
      if (std::ranges::find(once, folder) == once.end()) once.push_back(folder);
    return once;
  }();
  return folders;
}

std::string wheel_file(const std::string& name) {
  for (const std::string& folder : wheel_folders())
    if (is_there(fs::path(folder) / name)) return folder + "/" + name;
  return "";
}

}  // namespace md
