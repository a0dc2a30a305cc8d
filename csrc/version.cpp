// Identifies the build of the native core.
namespace firstlight {
int abi_version() { return 1; }
}  // namespace firstlight
