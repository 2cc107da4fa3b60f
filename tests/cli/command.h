// Runs a command line as a user would and captures its output.
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

/// Whether a process can run with little address space: sanitizers reserve terabytes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kAddressSpaceCanBeLimited = false;
#else
inline constexpr bool kAddressSpaceCanBeLimited = true;
#endif

struct Outcome {
  int status = -1;  // exit status; 128 + signal when killed
  std::string out, err;
};

/// Runs `line` in a shell.
inline Outcome shell(const std::string& line) {
  TemporaryFolder folder;
  std::string out = folder / "out", err = folder / "err";
  int status = std::system(("{ " + line + "\n} </dev/null >" + out + " 2>" + err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err)};
}

/// Runs the built program with its words passed literally. `environment`: arguments of env, as in "-u A B=1". The XLA
/// flags of CPU programs (PLAIN_PROGRAMS, cmake/modules.cmake) are fatal to the plugins of TPUs and GPUs.
inline Outcome maxdiffusion(const std::vector<std::string>& words, const std::string& environment = "") {
  const bool another = std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word == "hardware=tpu" || word == "hardware=gpu" || word.starts_with("topology=");
  });
  std::string line = std::string("env ") + (another ? "-u XLA_FLAGS " : "") + environment;
  line += " " MD_BINARY_DIR "/maxdiffusion";
  for (std::string word : words) {
    for (size_t i = 0; (i = word.find('\'', i)) != std::string::npos; i += 4) word.replace(i, 1, "'\\''");
    line += " '" + word + "'";
  }
  return shell(line);
}

/// The bytes of a PNG file from its pixels on, without its text chunk of settings.
inline std::string pixels_of(const std::string& png) {
  const std::string bytes = read_file(png);
  return bytes.substr(bytes.find("IDAT"));
}

/// The contents of all files of a folder, concatenated.
inline std::string all_files(const std::string& folder) {
  std::string all;
  for (const auto& file : std::filesystem::directory_iterator(folder)) all += read_file(file.path());
  return all;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace md
