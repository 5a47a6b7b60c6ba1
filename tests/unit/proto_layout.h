/* One row of a layout, as a C and as a C++ compiler see it. */
#ifndef MLPO_TESTS_UNIT_PROTO_LAYOUT_H_
#define MLPO_TESTS_UNIT_PROTO_LAYOUT_H_

#include <stddef.h>

struct layout_row {
  const char* structure; /* NULL: a number */
  const char* name;      /* of a field or number; NULL: the struct itself */
  long long offset;      /* or the number */
  size_t bytes;
};

#ifdef __cplusplus
extern "C" {
#endif
extern const struct layout_row layout_in_c[];
extern const size_t layout_in_c_rows;
#ifdef __cplusplus
}
#endif

#define STRUCT(structure) {#structure, NULL, 0, sizeof(struct structure)},
#define FIELD(structure, field) \
  {#structure, #field, (long long)offsetof(struct structure, field), sizeof(((struct structure*)0)->field)},
#define NUMBER(name, value) {NULL, #name, (long long)(value), 0},

#endif /* MLPO_TESTS_UNIT_PROTO_LAYOUT_H_ */
