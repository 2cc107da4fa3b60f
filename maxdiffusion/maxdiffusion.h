// The public headers for programs outside this repository. Headers that they include are available too, but may change.
// A program links maxdiffusion::maxdiffusion; see examples/.
#pragma once

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/train/loop.h"
