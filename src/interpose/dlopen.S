/* dlopen, in front of the C library's. It asks halfwire_dlopen_target where this call goes and jumps there with the
 * caller's own arguments and return address: the loader finds the caller by that address (its search path, $ORIGIN,
 * namespace), and no compiler promises such a jump at every level of optimisation. */
  .text
  .globl dlopen
  .type dlopen, %function
  .hidden halfwire_dlopen_target
  .p2align 4
dlopen:
  .cfi_startproc
#if defined(__x86_64__)
#ifdef __CET__
  endbr64
#endif
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  subq $8, %rsp /* aligns the stack for the call */
  .cfi_adjust_cfa_offset 8
  movq 24(%rsp), %rdx
  call halfwire_dlopen_target
  addq $8, %rsp
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  jmp *%rax
#elif defined(__aarch64__)
  hint #34 /* bti c */
  stp x29, x30, [sp, #-32]!
  .cfi_def_cfa_offset 32
  .cfi_offset x29, -32
  .cfi_offset x30, -24
  stp x0, x1, [sp, #16]
  mov x2, x30
  bl halfwire_dlopen_target
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x29, x30, [sp], #32
  .cfi_restore x29
  .cfi_restore x30
  .cfi_def_cfa_offset 0
  br x16
#else
#error "dlopen.S knows x86-64 and aarch64"
#endif
  .cfi_endproc
  .size dlopen, .-dlopen
  .section .note.GNU-stack, "", %progbits
