// What the parts of a request are called by the protocol that it came by, for messages about them.
//
// Contract: constants.
#pragma once

#include <string_view>

namespace tessera {

struct GroupNames {
  std::string_view group;
  std::string_view num_features;
  std::string_view lengths;
  std::string_view values;
  std::string_view values_int64;
  std::string_view values_bytes;
  std::string_view weights;
};

struct FieldNames {
  std::string_view dense;
  GroupNames plain;
  GroupNames scored;
};

// protos/predictor.proto
inline constexpr FieldNames kPredictNames = {
    "float_features.values",
    {"id_list_features", "id_list_features.num_features", "id_list_features.lengths",
     "id_list_features.values", "id_list_features.values_int64", "id_list_features.values_bytes",
     "id_list_features.weights"},
    {"id_score_list_features", "id_score_list_features.num_features",
     "id_score_list_features.lengths", "id_score_list_features.values",
     "id_score_list_features.values_int64", "id_score_list_features.values_bytes",
     "id_score_list_features.weights"}};

inline constexpr GroupNames kSharedNames = {"shared_features.features",
                                            "shared_features.features.num_features",
                                            "shared_features.features.lengths",
                                            "shared_features.features.values",
                                            "shared_features.features.values_int64",
                                            "shared_features.features.values_bytes",
                                            "shared_features.features.weights"};

// The tensors of protos/inference.proto's ModelInfer, in the order of a model's arguments.
inline constexpr std::string_view kInferInputs[] = {"float_features",
                                                    "id_list_features_lengths",
                                                    "id_list_features_values",
                                                    "id_score_list_features_lengths",
                                                    "id_score_list_features_values",
                                                    "id_score_list_features_weights"};

inline constexpr FieldNames kInferNames = {
    kInferInputs[0],
    {kInferInputs[2], "", kInferInputs[1], kInferInputs[2], kInferInputs[2], kInferInputs[2], ""},
    {kInferInputs[4], "", kInferInputs[3], kInferInputs[4], kInferInputs[4], kInferInputs[4],
     kInferInputs[5]}};

}  // namespace tessera
