// A lease: at most one process owns a folder of an object store.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace md {

/// Held from construction to destruction. Arrow's filesystems have no create-if-absent, so each process writes its own
/// file into FOLDER/.lock/ and then lists that folder. Listings are consistent, so at least one of two processes sees
/// the other and withdraws. The file is renewed every few seconds. A lease expires a minute after its last renewal, by
/// the storage's clock, or if its process on this machine is dead. Thread safe.
class Lease {
 public:
  /// Waits up to `patience` for an owner on this machine to end. Throws io naming the owner.
  Lease(const std::string& folder, const std::string& owner, std::chrono::seconds patience = std::chrono::seconds(10));
  /// Releases the lease.
  ~Lease();
  Lease(const Lease&) = delete;
  /// Throws io if another process took the folder because this lease expired.
  void check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
