// A recipe as JSON and back, for manifests and results. The reader wants every key, no other, of the
// right type (files::JsonError) and in range (InvalidArgument); both name the key.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "train/recipe.h"

namespace annulus::train {

nlohmann::ordered_json to_json(const Recipe& recipe);
Recipe recipe_from_json(const nlohmann::ordered_json& json);

// The first field in which two recipes differ, as "steps 1000, not 500"; empty when none does.
std::string difference(const Recipe& saved, const Recipe& asked);

const char* name_of(Encoding e);
const char* name_of(RingRnnActivation a);

}  // namespace annulus::train
