// Linear layers on software tiles.
#include "amx_linear.h"
#include "amx_software.h"

namespace dualpace {

void amx_emulated_linear(const LinearArgs* args) { linear_on_tiles<SoftwareTiles>(args); }

}  // namespace dualpace
