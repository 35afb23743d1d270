// Which torch the library was compiled with, as a text in its data: kernels/libraries.py finds it
// by reading the file, and refuses the library under another minor release of torch before the
// loader can fail, or worse, succeed.
#include <torch/version.h>

#define TESSERA_TEXT_OF(number) #number
#define TESSERA_TEXT(number) TESSERA_TEXT_OF(number)

extern "C" __attribute__((visibility("default"), used)) const char tessera_built_with[] =
    "tessera operators for torch " TESSERA_TEXT(TORCH_VERSION_MAJOR) "." TESSERA_TEXT(
        TORCH_VERSION_MINOR);
