// Annulus: everything public.
#pragma once

#include "annulus/attention/attention.h"
#include "annulus/core/buffer.h"
#include "annulus/core/context.h"
#include "annulus/core/device.h"
#include "annulus/core/dlpack.h"
#include "annulus/core/dtype.h"
#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/core/tensor.h"
#include "annulus/dist/communicator.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/ring_attention/ring_attention.h"
#include "annulus/ring_attention/ring_attention_plan.h"
#include "annulus/ring_rnn/ring_rnn.h"
