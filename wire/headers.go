package wire

import "fmt"

// HeaderUnread stands for the header of a frame that does not say; no message has it.
const HeaderUnread Header = 255

// newMessage returns the zero message of a header.
func newMessage(h Header) Message {
	switch h {
	case HeaderConnect:
		return new(Connect)
	case HeaderConnectAck:
		return new(ConnectAck)
	case HeaderRegisterRoleAck:
		return new(RegisterRoleAck)
	case HeaderSubmitRequest:
		return new(SubmitRequest)
	case HeaderEngineReply:
		return new(EngineReply)
	case HeaderEngineReplyPartial:
		return new(EngineReplyPartial)
	case HeaderAbortRequest:
		return new(AbortRequest)
	case HeaderSubmitRequestWithKV:
		return new(SubmitRequestWithKV)
	case HeaderReleaseKV:
		return new(ReleaseKV)
	case HeaderSendKV:
		return new(SendKV)
	case HeaderRegisterRole:
		return new(RegisterRole)
	case HeaderKVReadDone:
		return new(KVReadDone)
	case HeaderRequestError:
		return new(RequestError)
	case HeaderKVTransferReady:
		return new(KVTransferReady)
	case HeaderRequestAborted:
		return new(RequestAborted)
	case HeaderPause:
		return new(Pause)
	case HeaderUnpause:
		return new(Unpause)
	case HeaderSuspend:
		return new(Suspend)
	case HeaderResume:
		return new(Resume)
	case HeaderSetGenerationEpoch:
		return new(SetGenerationEpoch)
	case HeaderStop:
		return new(Stop)
	case HeaderStartProfiler:
		return new(StartProfiler)
	case HeaderStopProfiler:
		return new(StopProfiler)
	case HeaderDisconnect:
		return new(Disconnect)
	case HeaderShutdown:
		return new(Shutdown)
	case HeaderTPBroadcast:
		return new(TPBroadcast)
	case HeaderJoinShard:
		return new(JoinShard)
	case HeaderShardJoined:
		return new(ShardJoined)
	case HeaderRanksReady:
		return new(RanksReady)
	case HeaderStepDone:
		return new(StepDone)
	case HeaderStepLogits:
		return new(StepLogits)
	case HeaderRankOrder:
		return new(RankOrder)
	case HeaderRankEvent:
		return new(RankEvent)
	case HeaderKVHandoffComplete:
		return new(KVHandoffComplete)
	case HeaderStatusRequest:
		return new(StatusRequest)
	case HeaderStatusReply:
		return new(StatusReply)
	case HeaderKVEvents:
		return new(KVEvents)
	case HeaderKVResync:
		return new(KVResync)
	case HeaderClaimKV:
		return new(ClaimKV)
	case HeaderClaimAck:
		return new(ClaimAck)
	case HeaderRenewKV:
		return new(RenewKV)
	case HeaderKVState:
		return new(KVState)
	}
	return &Unknown{Of: h}
}

// String names the message of a header.
func (h Header) String() string {
	switch h {
	case HeaderConnect:
		return "Connect"
	case HeaderConnectAck:
		return "ConnectAck"
	case HeaderRegisterRoleAck:
		return "RegisterRoleAck"
	case HeaderSubmitRequest:
		return "SubmitRequest"
	case HeaderEngineReply:
		return "EngineReply"
	case HeaderEngineReplyPartial:
		return "EngineReplyPartial"
	case HeaderAbortRequest:
		return "AbortRequest"
	case HeaderSubmitRequestWithKV:
		return "SubmitRequestWithKV"
	case HeaderReleaseKV:
		return "ReleaseKV"
	case HeaderSendKV:
		return "SendKV"
	case HeaderRegisterRole:
		return "RegisterRole"
	case HeaderKVReadDone:
		return "KVReadDone"
	case HeaderRequestError:
		return "RequestError"
	case HeaderKVTransferReady:
		return "KVTransferReady"
	case HeaderRequestAborted:
		return "RequestAborted"
	case HeaderPause:
		return "Pause"
	case HeaderUnpause:
		return "Unpause"
	case HeaderSuspend:
		return "Suspend"
	case HeaderResume:
		return "Resume"
	case HeaderSetGenerationEpoch:
		return "SetGenerationEpoch"
	case HeaderStop:
		return "Stop"
	case HeaderStartProfiler:
		return "StartProfiler"
	case HeaderStopProfiler:
		return "StopProfiler"
	case HeaderDisconnect:
		return "Disconnect"
	case HeaderShutdown:
		return "Shutdown"
	case HeaderTPBroadcast:
		return "TPBroadcast"
	case HeaderJoinShard:
		return "JoinShard"
	case HeaderShardJoined:
		return "ShardJoined"
	case HeaderRanksReady:
		return "RanksReady"
	case HeaderStepDone:
		return "StepDone"
	case HeaderStepLogits:
		return "StepLogits"
	case HeaderRankOrder:
		return "RankOrder"
	case HeaderRankEvent:
		return "RankEvent"
	case HeaderKVHandoffComplete:
		return "KVHandoffComplete"
	case HeaderStatusRequest:
		return "StatusRequest"
	case HeaderStatusReply:
		return "StatusReply"
	case HeaderKVEvents:
		return "KVEvents"
	case HeaderKVResync:
		return "KVResync"
	case HeaderClaimKV:
		return "ClaimKV"
	case HeaderClaimAck:
		return "ClaimAck"
	case HeaderRenewKV:
		return "RenewKV"
	case HeaderKVState:
		return "KVState"
	case HeaderUnread:
		return "unread"
	}
	return fmt.Sprintf("header %d", uint8(h))
}

// Header is HeaderConnect.
func (*Connect) Header() Header { return HeaderConnect }

// Header is HeaderConnectAck.
func (*ConnectAck) Header() Header { return HeaderConnectAck }

// Header is HeaderRegisterRoleAck.
func (*RegisterRoleAck) Header() Header { return HeaderRegisterRoleAck }

// Header is HeaderSubmitRequest.
func (*SubmitRequest) Header() Header { return HeaderSubmitRequest }

// Header is HeaderEngineReply.
func (*EngineReply) Header() Header { return HeaderEngineReply }

// Header is HeaderEngineReplyPartial.
func (*EngineReplyPartial) Header() Header { return HeaderEngineReplyPartial }

// Header is HeaderAbortRequest.
func (*AbortRequest) Header() Header { return HeaderAbortRequest }

// Header is HeaderSubmitRequestWithKV.
func (*SubmitRequestWithKV) Header() Header { return HeaderSubmitRequestWithKV }

// Header is HeaderReleaseKV.
func (*ReleaseKV) Header() Header { return HeaderReleaseKV }

// Header is HeaderSendKV.
func (*SendKV) Header() Header { return HeaderSendKV }

// Header is HeaderRegisterRole.
func (*RegisterRole) Header() Header { return HeaderRegisterRole }

// Header is HeaderKVReadDone.
func (*KVReadDone) Header() Header { return HeaderKVReadDone }

// Header is HeaderRequestError.
func (*RequestError) Header() Header { return HeaderRequestError }

// Header is HeaderKVTransferReady.
func (*KVTransferReady) Header() Header { return HeaderKVTransferReady }

// Header is HeaderRequestAborted.
func (*RequestAborted) Header() Header { return HeaderRequestAborted }

// Header is HeaderPause.
func (*Pause) Header() Header { return HeaderPause }

// Header is HeaderUnpause.
func (*Unpause) Header() Header { return HeaderUnpause }

// Header is HeaderSuspend.
func (*Suspend) Header() Header { return HeaderSuspend }

// Header is HeaderResume.
func (*Resume) Header() Header { return HeaderResume }

// Header is HeaderSetGenerationEpoch.
func (*SetGenerationEpoch) Header() Header { return HeaderSetGenerationEpoch }

// Header is HeaderStop.
func (*Stop) Header() Header { return HeaderStop }

// Header is HeaderStartProfiler.
func (*StartProfiler) Header() Header { return HeaderStartProfiler }

// Header is HeaderStopProfiler.
func (*StopProfiler) Header() Header { return HeaderStopProfiler }

// Header is HeaderDisconnect.
func (*Disconnect) Header() Header { return HeaderDisconnect }

// Header is HeaderShutdown.
func (*Shutdown) Header() Header { return HeaderShutdown }

// Header is HeaderTPBroadcast.
func (*TPBroadcast) Header() Header { return HeaderTPBroadcast }

// Header is HeaderJoinShard.
func (*JoinShard) Header() Header { return HeaderJoinShard }

// Header is HeaderShardJoined.
func (*ShardJoined) Header() Header { return HeaderShardJoined }

// Header is HeaderRanksReady.
func (*RanksReady) Header() Header { return HeaderRanksReady }

// Header is HeaderStepDone.
func (*StepDone) Header() Header { return HeaderStepDone }

// Header is HeaderStepLogits.
func (*StepLogits) Header() Header { return HeaderStepLogits }

// Header is HeaderRankOrder.
func (*RankOrder) Header() Header { return HeaderRankOrder }

// Header is HeaderRankEvent.
func (*RankEvent) Header() Header { return HeaderRankEvent }

// Header is HeaderKVHandoffComplete.
func (*KVHandoffComplete) Header() Header { return HeaderKVHandoffComplete }

// Header is that of the frame.
func (u *Unknown) Header() Header { return u.Of }
