/* Binds the threads of parallel regions to CPUs. */
#ifndef TRIPTYCH_BINDING_H
#define TRIPTYCH_BINDING_H

#include "matrix.h"

/* Bind thread i of later regions to chosen[i], for i from 1 on. Not to be called while a region runs. */
EXPORTED void bind_threads(const int64_t *chosen, int64_t count);
/* Bind this thread, the region's `thread`, to the CPU that was chosen for it, if any was. */
void bind_thread(int thread);

#endif
