// A command in a process of its own, with a limit on its time: what may hang or abort cannot take this process with it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace md {

struct ChildOptions {
  double seconds = 60;                             // then it is killed, with all that it has started
  std::map<std::string, std::string> environment;  // in addition to this process's
  std::vector<std::string> without;                // variables whose names begin so are left out
  std::string log;                                 // file that gets what it prints as well; empty: none
  /// Asked several times a second; true kills it. May be empty.
  std::function<bool()> enough;
};
struct ChildResult {
  int status = -1;         // exit status; -1: a signal ended it
  int signal = 0;          // that ended it
  bool timed_out = false;  // it was killed since its time was over
  bool stopped = false;    // by ChildOptions::enough
  double seconds = 0;      // that it ran
  int64_t peak_bytes = 0;  // of its resident memory
  std::string out, err;    // what it printed: the last 4 MB of each
  bool well() const { return status == 0; }
  /// "exit status 2", "signal 6 (Aborted)", "no answer after 30 s".
  std::string end() const;
  /// The last line of err that is not empty.
  std::string last_words() const;
};
/// Runs words[0] with the other words. It reads nothing, and ends with this process. Throws device where no process can
/// be started.
ChildResult run_child(const std::vector<std::string>& words, const ChildOptions& options);

/// The file that this process runs.
std::string own_program();

}  // namespace md
