-- Sends requests of one conversation, and requests that begin alike, to the same replica.
--
-- HAProxy runs this for each POST before it chooses a server. Its table remembers which server had a key last. This
-- action makes the keys of a request and sets these variables of the transaction:
--   txn.stay          the key whose server is to have the request; unset: the server with the fewest requests has it
--   txn.key1 to key8  the keys that the table is to remember with the server that gets the request
-- A server keeps a key only while it is not much busier than the others. Only the first bytes of a body are here
-- (tune.bufsize); a text is cut there, and nothing depends on what follows. A mistake costs a cached prefix, no more.

local LENGTHS = { 8192, 4096, 2048, 1024, 512, 256, 128 } -- bytes of a text that are keys, if it has them
local SESSION_HEADERS = { "x-session-id", "session-id", "session_id", "x-conversation-id", "conversation_id" }
local QUOTE, OBJECT, ARRAY = 34, 123, 91
local servers_of = {} -- by backend: its servers by number, without those for emergencies

-- The place of the quote that ends the string at `at`; nil: it is cut.
local function string_end(body, at)
    local from = at + 1
    while true do
        local found = body:find('["\\]', from)
        if not found then return nil end
        if body:byte(found) == QUOTE then return found end
        from = found + 2
    end
end

-- The last place of the JSON value at `at`; nil: it is cut.
local function value_end(body, at)
    local first = body:byte(at)
    if first == QUOTE then return string_end(body, at) end
    if first ~= OBJECT and first ~= ARRAY then
        local stop = body:find("[,%]}%s]", at)
        return stop and stop - 1
    end
    local depth, from = 0, at
    while true do
        local found = body:find('["%[%]{}]', from)
        if not found then return nil end
        local byte = body:byte(found)
        if byte == QUOTE then
            found = string_end(body, found)
            if not found then return nil end
        elseif byte == OBJECT or byte == ARRAY then
            depth = depth + 1
        else
            depth = depth - 1
            if depth <= 0 then return found end
        end
        from = found + 1
    end
end

-- Iterate over the members of the object at `at`: the name and the place of the value.
local function members(body, at)
    local from, value = at + 1, nil
    return function()
        local last = not value or value_end(body, value)
        if not last then return nil end
        from = value and last + 1 or from
        local name = body:match('^[%s,]*()"', from)
        local name_end = name and string_end(body, name)
        value = name_end and body:match("^%s*:%s*()%S", name_end + 1)
        return value and body:sub(name + 1, name_end - 1), value
    end
end

-- The last place of the first message of the user in the array at `at`; nil: there is none.
local function first_question_end(body, at)
    local from = at + 1
    while true do
        local message = body:match("^[%s,]*(){", from)
        if not message then return nil end
        for name, value in members(body, message) do
            if name == "role" and body:sub(value, value + 5) == '"user"' then
                return value_end(body, message) or #body
            end
        end
        local last = value_end(body, message)
        if not last then return nil end
        from = last + 1
    end
end

-- The string at `at` of a body; nil: there is none.
local function string_at(body, at)
    local last = body:byte(at) == QUOTE and string_end(body, at)
    return last and body:sub(at, last) or nil
end

-- The name that a client gives its conversation in the body, then where the text and its first question are.
local function read(body, is_response)
    local start = body:match("^%s*(){")
    local named, continued, text, question
    local is_named = body:find('"prompt_cache_key"', 1, true) or body:find('"previous_response_id"', 1, true)
    for name, value in (start and members(body, start) or function() end) do
        if name == "messages" or name == "prompt" or (name == "input" and is_response) then
            text = value
            question = body:byte(value) == ARRAY and first_question_end(body, value) or nil
            if not is_named then break end
        elseif name == "prompt_cache_key" then
            named = string_at(body, value)
        elseif name == "previous_response_id" then
            continued = (string_at(body, value) or ""):match('%-k(%x+)"$')
        end
    end
    return named, continued, text, question
end

-- The keys of a request, the most telling one first, and how many of them are a conversation's: its name or first
-- question, else what is at least an eighth of the text.
local function keys_of(txn, body)
    local is_response = txn.sf:path():match("/responses$")
    local named, continued, text, question = read(body, is_response)
    if continued then return { tonumber(continued, 16) & 0xffffffff }, 1 end
    for _, header in ipairs(SESSION_HEADERS) do
        local value = txn.sf:req_hdr(header)
        if value and value ~= "" then named = value end
    end
    if named then return { txn.c:xxh32(named, 1) & 0xffffffff }, 1 end
    local keys = {}
    if question then keys[1] = txn.c:xxh32(body:sub(text, math.min(question, text + 65535)), 2) & 0xffffffff end
    for _, length in ipairs(LENGTHS) do
        if text and text + length - 1 <= #body then
            keys[#keys + 1] = txn.c:xxh32(body:sub(text, text + length - 1), 3) & 0xffffffff
        end
    end
    if text and #keys == 0 then keys[1] = txn.c:xxh32(body:sub(text), 3) & 0xffffffff end
    return keys, question and 1 or 3
end

local function servers(backend)
    if not servers_of[backend] then
        local found = {}
        for _, server in pairs(core.backends[backend].servers) do
            if server:get_stats().bck ~= 1 then found[tonumber(server:get_puid())] = server:get_name() end
        end
        servers_of[backend] = found
    end
    return servers_of[backend]
end

-- The most requests that a server may have for a conversation, and for a text that only begins alike.
local function bounds(txn, backend)
    local least, total, count = math.huge, 0, 0
    for _, name in pairs(servers(backend)) do
        if txn.f:srv_is_up(backend .. "/" .. name) == 1 then
            local requests = txn.f:srv_conn(backend .. "/" .. name)
            least, total, count = math.min(least, requests), total + requests, count + 1
        end
    end
    return math.max(least + 3, 2 * total / count), least + 1
end

core.register_action("triptych_affinity", { "http-req" }, function(txn)
    local body = txn.sf:req_body()
    if body == "" then return end
    local keys, telling = keys_of(txn, body)
    if #keys == 0 then return end
    local backend = txn.f:be_name()
    local most, most_alike = bounds(txn, backend)
    local known = {}
    for at, key in ipairs(keys) do
        local number = tonumber(txn.c:table_server_id(tostring(key), backend)) or 0
        local name = servers(backend)[number]
        known[at] = name ~= nil
        if name and not known.stays and txn.f:srv_is_up(backend .. "/" .. name) == 1 then
            local bound = at <= telling and most or most_alike
            if txn.f:srv_conn(backend .. "/" .. name) <= bound then
                known.stays = true
                txn:set_var("txn.stay", key)
            end
        end
    end
    for at, key in ipairs(keys) do
        if at == 1 or not known[at] then txn:set_var("txn.key" .. at, key) end
    end
    if txn.sf:path():match("/responses$") and not txn.f:req_fhdr("x-request-id") then
        local random = txn.f:uuid():gsub("-", ""):sub(1, 24)
        txn.http:req_set_header("x-request-id", ("%s-k%08x"):format(random, keys[1]))
    end
end)
