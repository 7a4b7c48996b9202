#include "annulus/cpu/tile.h"
namespace annulus::cpu {
const Tiles<float>* detail::bf16_tiles_x86(Arithmetic) { return nullptr; }
}  // namespace annulus::cpu
