"""Table of all operators that behave differently on CUDA. Importing it imports every file that registers one."""

from lowtide.estimator.cuda.ops import attention as attention
from lowtide.estimator.cuda.ops import attention_flash as attention_flash
from lowtide.estimator.cuda.ops import attention_mem_efficient as attention_mem_efficient
from lowtide.estimator.cuda.ops import autocast as autocast
from lowtide.estimator.cuda.ops import convolution as convolution
from lowtide.estimator.cuda.ops import dropout as dropout
from lowtide.estimator.cuda.ops import indexing as indexing
from lowtide.estimator.cuda.ops import matmul as matmul
from lowtide.estimator.cuda.ops import normalization as normalization
from lowtide.estimator.cuda.ops import optimizers as optimizers
from lowtide.estimator.cuda.ops import pooling as pooling
from lowtide.estimator.cuda.ops import reductions as reductions
from lowtide.estimator.cuda.ops import rnn as rnn
from lowtide.estimator.cuda.ops import softmax as softmax
from lowtide.estimator.cuda.ops import sync_batch_norm as sync_batch_norm
from lowtide.estimator.cuda.ops.op_registry import BEHAVIOURS as BEHAVIOURS
from lowtide.estimator.cuda.ops.op_registry import CUDA_OPS as CUDA_OPS
from lowtide.estimator.cuda.ops.op_registry import KERNELS as KERNELS
from lowtide.estimator.cuda.ops.op_registry import CudaOp as CudaOp
