/* The protocol's layout as a C11 compiler sees it. */
#include "tests/unit/proto_layout.h"

/* Each header must stand by itself in C: this order is the reverse of their dependence. */
#include "proto/control.h"
#include "proto/ring.h"
/* */
#include "proto/abi.h"
#include "proto/command.h"
#include "proto/counters.h"
#include "proto/status.h"
#include "proto/tensor.h"
/* The C API must be C too. */
#include "mlpo/client.h"

const struct layout_row layout_in_c[] = {
#include "tests/unit/proto_layout_fields.h"
};
const size_t layout_in_c_rows = sizeof layout_in_c / sizeof layout_in_c[0];

/* The initialisers are constant expressions of the structs they begin. */
const struct mlpo_connect_options connect_defaults = MLPO_CONNECT_OPTIONS_INIT;
const struct mlpo_subgroup_options subgroup_defaults = MLPO_SUBGROUP_OPTIONS_INIT;
const struct mlpo_update_options update_defaults = MLPO_UPDATE_OPTIONS_INIT;
