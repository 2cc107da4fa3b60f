// Runs a command line as a user would, and keeps what it said.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

struct Outcome {
  int status = -1;  // exit status; 128 + signal when killed
  std::string out, err;
};

/// `line` is read by the shell.
inline Outcome shell(const std::string& line) {
  TemporaryFolder folder;
  std::string out = folder / "out", err = folder / "err";
  int status = std::system(("{ " + line + "\n} </dev/null >" + out + " 2>" + err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err)};
}

/// The program just built, its words taken literally. `environment`: words for env, as in "-u A B=1".
inline Outcome maxdiffusion(const std::vector<std::string>& words, const std::string& environment = "") {
  std::string line = "env " + environment + " " MD_BINARY_DIR "/maxdiffusion";
  for (std::string word : words) {
    for (size_t i = 0; (i = word.find('\'', i)) != std::string::npos; i += 4) word.replace(i, 1, "'\\''");
    line += " '" + word + "'";
  }
  return shell(line);
}

/// What the files of a folder hold, one after the other.
inline std::string all_files(const std::string& folder) {
  std::string all;
  for (const auto& file : std::filesystem::directory_iterator(folder)) all += read_file(file.path());
  return all;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace md
