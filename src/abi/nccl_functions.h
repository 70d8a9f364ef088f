// Every public function of NCCL 2.28.9 as X(return type, name, (parameters), (arguments)): the one table from
// which wrappers, the resolver, the host engine's refusals and the check against nccl.h are generated.
#pragma once

// clang-format off
#define HALFWIRE_NCCL_FUNCTIONS(X) \
  X(ncclResult_t, ncclMemAlloc, (void** ptr, size_t size), (ptr, size)) \
  X(ncclResult_t, ncclMemFree, (void *ptr), (ptr)) \
  X(ncclResult_t, ncclGetVersion, (int *version), (version)) \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId* uniqueId), (uniqueId)) \
  X(ncclResult_t, ncclCommInitRankConfig, (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config), (comm, nranks, commId, rank, config)) \
  X(ncclResult_t, ncclCommInitRank, (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank), (comm, nranks, commId, rank)) \
  X(ncclResult_t, ncclCommInitAll, (ncclComm_t* comm, int ndev, const int* devlist), (comm, ndev, devlist)) \
  X(ncclResult_t, ncclCommFinalize, (ncclComm_t comm), (comm)) \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm)) \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm), (comm)) \
  X(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags), (comm, revokeFlags)) \
  X(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t* config), (comm, color, key, newcomm, config)) \
  X(ncclResult_t, ncclCommShrink, (ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags), (comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags)) \
  X(ncclResult_t, ncclCommInitRankScalable, (ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds, ncclConfig_t* config), (newcomm, nranks, myrank, nId, commIds, config)) \
  X(const char*, ncclGetErrorString, (ncclResult_t result), (result)) \
  X(const char*, ncclGetLastError, (ncclComm_t comm), (comm)) \
  X(void, ncclResetDebugInit, (), ()) \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError), (comm, asyncError)) \
  X(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int* count), (comm, count)) \
  X(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int* device), (comm, device)) \
  X(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int* rank), (comm, rank)) \
  X(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void* buff, size_t size, void** handle), (comm, buff, size, handle)) \
  X(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void* handle), (comm, handle)) \
  X(ncclResult_t, ncclCommWindowRegister, (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags), (comm, buff, size, win, winFlags)) \
  X(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win), (comm, win)) \
  X(ncclResult_t, ncclRedOpCreatePreMulSum, (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm), (op, scalar, datatype, residence, comm)) \
  X(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm), (op, comm)) \
  X(ncclResult_t, ncclReduce, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, root, comm, stream)) \
  X(ncclResult_t, ncclBcast, (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (buff, count, datatype, root, comm, stream)) \
  X(ncclResult_t, ncclBroadcast, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \
  X(ncclResult_t, ncclAllReduce, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, comm, stream)) \
  X(ncclResult_t, ncclReduceScatter, (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, recvcount, datatype, op, comm, stream)) \
  X(ncclResult_t, ncclAllGather, (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, sendcount, datatype, comm, stream)) \
  X(ncclResult_t, ncclAlltoAll, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, comm, stream)) \
  X(ncclResult_t, ncclGather, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \
  X(ncclResult_t, ncclScatter, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream)) \
  X(ncclResult_t, ncclSend, (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (sendbuff, count, datatype, peer, comm, stream)) \
  X(ncclResult_t, ncclRecv, (void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (recvbuff, count, datatype, peer, comm, stream)) \
  X(ncclResult_t, ncclGroupStart, (), ()) \
  X(ncclResult_t, ncclGroupEnd, (), ()) \
  X(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t* simInfo), (simInfo))
// clang-format on

// Functions that NCCL's device header adds to the library. Programs reach them directly; the host engine refuses
// them by name.
#define HALFWIRE_NCCL_DEVICE_FUNCTIONS(X) \
  X(ncclDevCommCreate) X(ncclDevCommDestroy) X(ncclGinBarrierCreateRequirement) X(ncclLLA2ACalcSlots) \
  X(ncclLLA2ACreateRequirement) X(ncclLsaBarrierCreateRequirement) X(ncclTeamLsa) X(ncclTeamRail) \
  X(ncclTeamRankToLsa) X(ncclTeamRankToWorld) X(ncclTeamWorld)
