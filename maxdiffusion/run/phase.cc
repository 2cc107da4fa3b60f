#include "maxdiffusion/run/phase.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"

namespace md {

Phase::Phase(std::string name, std::string file) : name_(std::move(name)), file_(std::move(file)) {
  write(fmt::format("Starting: {}...", name_));
}

Phase::~Phase() {
  write(fmt::format("Finished: {} - Duration: {:.4f} seconds", name_,
                    std::chrono::duration<double>(Clock::now() - start_).count()));
}

void Phase::write(const std::string& line) {
  log_info("{}", line);
  if (file_.empty()) return;
  try {
    FileWriter w(file_, FileWriter::Open::append);
    w.write((line + "\n").data(), line.size() + 1);
  } catch (const Error& e) {
    log_warning("timing_metrics_file cannot be written any more, training continues: {}", e.what());
    file_.clear();
  }
}

}  // namespace md
