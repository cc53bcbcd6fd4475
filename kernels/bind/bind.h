// The module's parts, one a file; module.cpp calls each.
#pragma once

#include <nanobind/nanobind.h>

void bind_runtime(nanobind::module_ &m);
void bind_machine_limits(nanobind::module_ &m);
void bind_linear(nanobind::module_ &m);
void bind_merges(nanobind::module_ &m);
void bind_quantize(nanobind::module_ &m);
void bind_sampler(nanobind::module_ &m);
