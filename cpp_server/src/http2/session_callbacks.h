// What nghttp2 tells of a session, handed to its connection.
//
// Contract: the session's user data is its Connection, a stream's its Call or null. No exception
// passes through nghttp2: one that a connection throws ends the connection.
#pragma once

#include "http2/session.h"

namespace tessera::http2 {

// The callbacks of every server session of this process; they are made once.
const nghttp2_session_callbacks& server_callbacks();

// The source of a call's answer, for nghttp2_submit_response.
nghttp2_data_provider answer_source(class Call& call);

}  // namespace tessera::http2
