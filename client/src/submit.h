// Submitting through the ring, for those who need one submission and its end.
#pragma once

#include <cstdint>

#include "client/src/clock.h"
#include "mlpo/client.h"
#include "proto/command.h"

namespace mlpo::client {

// Ring lock held. Waits until `places` submissions fit and the daemon takes new work.
int CheckTakesWork(mlpo_client* client, Deadline deadline, uint32_t places);
// Submits one submission; `subgroup` may be nullptr. The caller frees *request.
int Submit(mlpo_client* client, mlpo_subgroup* subgroup, const mlpo_submission& submission, Deadline deadline,
           mlpo_request** request);
int SubmitAndWait(mlpo_client* client, mlpo_subgroup* subgroup, const mlpo_submission& submission, Deadline deadline);

}  // namespace mlpo::client
