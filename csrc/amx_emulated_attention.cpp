// Attention on software tiles; all but the tiles is what the hardware's uses.
#include "amx_attention.h"
#include "amx_software.h"

namespace dualpace {

void amx_emulated_attention(const AttentionArgs* args) { attention_on_tiles<SoftwareTiles>(args); }

}  // namespace dualpace
