#pragma once

#include <nanobind/nanobind.h>

void bind_dense(nanobind::module_& m);
