#include "security/secret_file.h"

#include <sys/stat.h>

#include <ios>
#include <sstream>

namespace tessera {

void warn_if_readable(const std::string& path, const Log& log) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0 || (about.st_mode & S_IROTH) == 0) return;
  std::ostringstream mode;
  constexpr unsigned kPermissions = 07777;
  mode << std::oct << (about.st_mode & kPermissions);
  log.warning("secret_readable_by_others", {{"path", path}, {"mode", mode.str()}});
}

}  // namespace tessera
