#include "maxdiffusion/run/shared_folder.h"

#include <chrono>
#include <filesystem>
#include <random>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/processes/rendezvous.h"

namespace md {

void check_shared(const std::string& folder) {
  Processes& all = processes();
  if (all.alone()) return;
  std::random_device bits;
  std::string file;
  if (all.is_coordinator()) {
    file = fmt::format("{}/.seen-{:08x}{:08x}", folder, bits(), bits());
    make_folders(folder);
    write_file_atomic(file, "");
  }
  // The path is process 0's: the same path on another host may be another folder.
  const std::string name = std::filesystem::path(all.from_coordinator("shared folder", file)).filename();
  bool seen = false;
  for (int i = 0; i < 30 && !(seen = exists(folder + "/" + name)); ++i)  // network file systems may be delayed
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::vector<std::string> gathered = all.gather("shared folder", (seen ? "+" : "-") + host_name());
  if (all.is_coordinator()) std::filesystem::remove(file);
  for (size_t p = 0; p < gathered.size(); ++p)
    if (gathered[p].starts_with('-'))
      throw Error(Code::io, fmt::format("'{}': process {} on '{}' does not find a file that process 0 on '{}' has "
                                        "written; expected one folder for all",
                                        folder, p, gathered[p].substr(1), gathered[0].substr(1)))
          .note("try: a folder of a shared file system, or output_dir=gs://BUCKET/PATH or s3://BUCKET/PATH");
}

}  // namespace md
