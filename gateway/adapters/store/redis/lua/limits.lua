-- limits, version 6: limits of keys, entitlements and tenants, over all models. Made only for
-- requests that have any. A transcription of gateway/policy/budgets/limit_book.py.
--
-- All counters are fields of one hash, whose name comes with each call: models without limits
-- need no further key. A counter is a msgpack list: the fields below, then the slices' starts and
-- amounts in turn, ascending. Of a limit of sequences only RESERVED is used. `clock` has the time
-- of all limits, as book_time keeps a model's; tick.lua advances it.
--
-- RESERVED has the sum over a model's leases by the model's epoch, because either half may be lost:
-- `models` has for each model {epoch, time of its last tick, its epoch before}. What epochs that
-- are not in there reserved is dropped (heal); a model that is not counts its leases (tick.lua).
--
-- asked    {hash, {wanted, {id, unit, amount, step_s, start_s, next_s, kept_s, warn, spot}} ...}
-- held     of a lease: {hash, {id, unit, slice_s, amount} ...}

local TOTAL, RESERVED, WARNED_S, ADDED, ADDED_UNTIL_S, SLICES = 1, 2, 3, 4, 5, 6
local now_s = now_s -- of limits, once counters were read
local models

local function counters_of(hash, ids)
  local kept, counters = call('HMGET', hash, 'clock', unpack(ids)), {}
  if kept[1] and read_s then now_s = steady(kept[1], read_s) end
  for i = 1, #ids do
    counters[i] = kept[i + 1] and unpacked(kept[i + 1]) or {0, {}, -1, 0, 0}
  end
  return counters
end

local function reserved_of(counter)
  local sum = 0
  for _, amount in pairs(counter[RESERVED]) do sum = sum + amount end
  return sum
end

local function hold(counter, amount)
  local sum = (counter[RESERVED][book.epoch] or 0) + amount
  counter[RESERVED][book.epoch] = sum > 0 and sum or nil
end

local function models_of(hash)
  if not models then
    local kept = call('HGET', hash, 'models')
    models = kept and unpacked(kept) or {}
  end
  return models
end

-- Drops what lost models reserved; returns what is reserved.
local function heal(hash, counter)
  local known = {}
  for _, model in pairs(models_of(hash)) do known[model[1]] = true end
  if next(known) then
    for epoch in pairs(counter[RESERVED]) do
      if not known[epoch] then counter[RESERVED][epoch] = nil end
    end
  end
  return reserved_of(counter)
end

local function counters_held(held)
  local ids = {}
  for i = 2, #held do ids[i - 1] = held[i][1] end
  return counters_of(held[1], ids), ids
end

local function save_counters(hash, ids, counters)
  local written = {}
  for i, id in ipairs(ids) do
    written[#written + 1] = id
    written[#written + 1] = pack(counters[i])
  end
  call('HSET', hash, unpack(written))
end

-- When the slice after the one that starts then begins.
local function next_of(limit, start_s)
  return limit.step_s > 0 and start_s + limit.step_s or limit.next_s
end

-- Removes slices that a wrong clock began, and returns what they counted.
local function recall(counter, limit, start_s)
  local early = 0
  while #counter > SLICES and counter[#counter - 1] > now_s do
    early = early + table.remove(counter)
    table.remove(counter)
  end
  counter[WARNED_S] = min(counter[WARNED_S], start_s)
  counter[ADDED_UNTIL_S] = min(counter[ADDED_UNTIL_S], next_of(limit, start_s) + limit.kept_s)
  return early
end

local function roll(counter, limit)
  local start_s = now_s < limit.next_s and limit.start_s or limit.next_s
  if limit.step_s > 0 then start_s = math.floor(now_s / limit.step_s) * limit.step_s end
  local newest, early = #counter - 1, 0
  if newest >= SLICES and counter[newest] > now_s then
    early = recall(counter, limit, start_s)
    newest = #counter - 1
  end
  if start_s > now_s then -- the gateway's clock is wrong: it does not know the current slice
    start_s = newest >= SLICES and counter[newest] or now_s
  end
  if newest < SLICES or counter[newest] < start_s then
    counter[#counter + 1], counter[#counter + 2] = start_s, 0
  else
    start_s = counter[newest]
  end
  counter[#counter] = counter[#counter] + early
  while #counter > SLICES + 3 and counter[SLICES + 2] < start_s - limit.kept_s do
    table.remove(counter, SLICES)
    table.remove(counter, SLICES)
  end
  return start_s
end

local function level(counter, since_s)
  local used = 0
  for i = #counter - 1, SLICES, -2 do
    if counter[i] < since_s then break end
    used = used + counter[i + 1]
  end
  return used
end

local function allowed(counter, amount)
  return now_s < counter[ADDED_UNTIL_S] and amount + counter[ADDED] or amount
end

-- What a slice after the newest counted is in the newest now (see roll).
local function post(counter, slice_s, amount)
  counter[TOTAL] = counter[TOTAL] + amount
  local newest = #counter - 1
  for i = newest, SLICES, -2 do
    if counter[i] == slice_s or (i == newest and counter[i] < slice_s) then
      counter[i + 1] = max(0, counter[i + 1] + amount)
      return
    end
  end
end

-- When so much is free again: by the calendar at the next window, else as slices age.
local function resets_s(counter, limit, start_s, amount)
  if limit.step_s == 0 then return limit.next_s end
  local freed = 0
  for i = SLICES, #counter - 1, 2 do
    if counter[i] >= start_s - limit.kept_s then
      freed = freed + counter[i + 1]
      if freed >= amount then return counter[i] + limit.kept_s + limit.step_s end
    end
  end
  return start_s + limit.kept_s + limit.step_s
end

local function read(asked)
  local limits, ids = {}, {}
  for i = 2, #asked do
    local limit
    limit = READ_limit(asked[i][2])
    limit.wanted = asked[i][1]
    limits[i - 1], ids[i - 1] = limit, limit.id
  end
  return {hash = asked[1], counters = counters_of(asked[1], ids), ids = ids, limits = limits}
end

-- The denial by a limit that has no room, its place, what is used of it, and when it has room.
local function over(limit, i, amount, used, reserved, free_s, service_s)
  local reason, wait_s = 'key_requests', free_s - now_s
  if limit.wanted > max(amount, limit.amount) then
    -- What an administrator took away comes back with the next window.
    reason, wait_s = 'exceeds_entitlement', 0
  elseif limit.unit == 'sequences' then
    reason, wait_s = 'key_concurrency', service_s / max(1, reserved)
  elseif limit.unit ~= 'requests' then
    reason = 'budget'
    if used - reserved + limit.wanted <= amount then
      reason = 'budget_reserved'
      wait_s = service_s / max(1, math.floor(reserved / max(1, limit.wanted)))
    end
  end
  return {reason, wait_s, amount, used, limit.wanted, limit.unit, false, i - 1, reserved, free_s}
end

-- The denial by the first limit that the request passes, unless a later one could never hold it,
-- and whether one demotes it.
local function weigh(known, service_s)
  local demoted, denial = false, nil
  for i, limit in ipairs(known.limits) do
    local counter = known.counters[i]
    local amount, used, start_s = allowed(counter, limit.amount), nil, nil
    if limit.unit ~= 'sequences' then
      start_s = roll(counter, limit)
      used = level(counter, start_s - limit.kept_s)
    else
      used = reserved_of(counter)
      if used + limit.wanted > amount then used = heal(known.hash, counter) end
    end
    if used + limit.wanted <= amount then
      -- it fits
    elseif limit.spot then
      demoted = true
    elseif not denial or limit.wanted > max(amount, limit.amount) then
      local free_s = start_s
        and resets_s(counter, limit, start_s, used + limit.wanted - amount) or 0
      denial = over(limit, i, amount, used, heal(known.hash, counter), free_s, service_s)
      if denial[1] == 'exceeds_entitlement' then break end
    end
  end
  return denial, demoted
end

-- Takes what the request may use; returns the lease's `held`, and each limit's level, amount and
-- whether this request crossed the level that warns.
local function reserve(known)
  local held, uses = {known.hash}, {}
  for i, limit in ipairs(known.limits) do
    local counter, start_s, crossed = known.counters[i], 0, false
    local used
    hold(counter, limit.wanted)
    if limit.unit == 'sequences' then
      used = reserved_of(counter)
    else
      start_s = roll(counter, limit)
      counter[#counter] = counter[#counter] + limit.wanted
      counter[TOTAL] = counter[TOTAL] + limit.wanted
      used = level(counter, start_s - limit.kept_s)
      if 0 < limit.warn and limit.warn <= used and counter[WARNED_S] < start_s - limit.kept_s then
        counter[WARNED_S], crossed = start_s, true
      end
    end
    held[#held + 1] = {known.ids[i], limit.unit, start_s, limit.wanted}
    uses[#uses + 1] = {used, allowed(counter, limit.amount), crossed}
  end
  save_counters(known.hash, known.ids, known.counters)
  return held, uses
end

-- Changes the counters of a lease's limits: `sign` -1 ends its reservations, 1 begins them again,
-- and `correction` gives for each of them the change of what was counted.
local function change(held, sign, correction)
  local counters, ids = counters_held(held)
  for i, counter in ipairs(counters) do
    local _, unit, slice_s, amount = unpack(held[i + 1])
    hold(counter, sign * amount)
    local more = unit ~= 'sequences' and correction(unit, amount) or 0
    if more ~= 0 then post(counter, slice_s, more) end
  end
  save_counters(held[1], ids, counters)
end

-- What was used instead of what was reserved: {tokens, money}, or false for nothing.
local function used_by(spent)
  return function(unit, amount)
    if not spent then return -amount end
    if unit == 'tokens' then return spent[1] - amount end
    return unit == 'money' and spent[2] - amount or 0
  end
end

local function nothing() return 0 end

local function resized(held, before, after)
  local resizes = {held[1]}
  local counters, ids = counters_held(held)
  for i, counter in ipairs(counters) do
    local id, unit, slice_s, amount = unpack(held[i + 1])
    local now = amount
    if unit == 'tokens' then now = after end
    if unit == 'money' then now = math.floor(amount * after / max(1, before)) end
    if now ~= amount then
      hold(counter, now - amount)
      post(counter, slice_s, now - amount)
    end
    resizes[#resizes + 1] = {id, unit, slice_s, now}
  end
  save_counters(held[1], ids, counters)
  return resizes
end

-- Counts the reservations of a lease that this server did not know, which was counted under an
-- epoch of the model. If only the model was lost since, what windows count is still there.
local function adopt(held, epoch)
  local counters, ids = counters_held(held)
  local model = models_of(held[1])[STATE]
  local counted = epoch and model and epoch ~= book.epoch
    and (epoch == model[1] or epoch == model[3])
  for i, counter in ipairs(counters) do
    local _, unit, slice_s, amount = unpack(held[i + 1])
    hold(counter, amount)
    if unit ~= 'sequences' and not counted then
      local newest = #counter - 1
      if newest < SLICES or (counter[newest] < slice_s and slice_s <= now_s) then
        counter[#counter + 1], counter[#counter + 2] = min(slice_s, now_s), 0
      end
      post(counter, slice_s, amount)
    end
  end
  save_counters(held[1], ids, counters)
end

-- What an administrator sees: used, reserved, added, when it resets, total.
local function view(known, i)
  local counter, limit = known.counters[i], known.limits[i]
  local reserved = heal(known.hash, counter)
  if limit.unit == 'sequences' then return {reserved, reserved, 0, 0, 0} end
  local start_s = roll(counter, limit)
  return {level(counter, start_s - limit.kept_s), reserved, allowed(counter, 0),
    resets_s(counter, limit, start_s, 1), counter[TOTAL]}
end

local function add(known, i, amount)
  local counter, limit = known.counters[i], known.limits[i]
  local start_s = roll(counter, limit)
  counter[ADDED] = allowed(counter, 0) + amount
  counter[ADDED_UNTIL_S] = next_of(limit, start_s) + limit.kept_s
  save_counters(known.hash, known.ids, known.counters)
end

-- How long after its start a slice counts at most, by window; see windows.py.
local COUNTED_S = {minute = 62, hour = 7200, day = 172800, week = 691200, month = 2764800}
local LONGEST_S = 8640000

local function forgettable(hash, id, counter)
  if heal(hash, counter) ~= 0 or now_s < counter[ADDED_UNTIL_S] then return false end
  local since_s = now_s - (COUNTED_S[string.match(id, '[^:]*$')] or LONGEST_S)
  for i = SLICES, #counter - 1, 2 do
    if counter[i + 1] ~= 0 and counter[i] > since_s then return false end
  end
  return true
end

-- Drops those of the counters that are over; returns a page of others that are, and the next one.
local function sweep(hash, page, ids)
  if #ids > 0 then
    for i, counter in ipairs(counters_of(hash, ids)) do
      if forgettable(hash, ids[i], counter) then call('HDEL', hash, ids[i]) end
    end
  end
  local seen, found = call('HSCAN', hash, page, 'COUNT', 100), {}
  for i = 1, #seen[2], 2 do
    local id = seen[2][i]
    if string.find(id, ':', 1, true) and forgettable(hash, id, unpacked(seen[2][i + 1])) then
      found[#found + 1] = id
    end
  end
  return {seen[1], found}
end

-- Counts what all leases of the model reserve anew.
local function recount(hash)
  local sums = {}
  for _, kept in ipairs(call('HVALS', LEASES)) do
    local lease
    lease = READ_lease(kept)
    for i = 2, lease.held and #lease.held or 0 do
      local id, _, _, amount = unpack(lease.held[i])
      sums[id] = (sums[id] or 0) + amount
    end
  end
  for id, sum in pairs(sums) do
    local counters = counters_of(hash, {id})
    counters[1][RESERVED][book.epoch] = sum
    save_counters(hash, {id}, counters)
  end
end

-- Notes that the model is served; forgets those that nobody serves.
local function tick(hash, time_s, silent_s)
  local model = models_of(hash)[STATE]
  if not model or model[1] ~= book.epoch then
    recount(hash)
    models[STATE] = {book.epoch, time_s, model and model[1]}
  else
    model[2] = time_s
  end
  for name, other in pairs(models) do
    if other[2] < time_s - silent_s then models[name] = nil end
  end
  call('HSET', hash, 'models', pack(models))
end

return {
  tick = tick, read = read, weigh = weigh, reserve = reserve, add = add, view = view,
  resized = resized, adopt = adopt, sweep = sweep,
  settle = function(held, spent) change(held, -1, used_by(spent)) end,
  lapse = function(held) change(held, -1, nothing) end,
  revive = function(held) change(held, 1, nothing) end,
  correct = function(held, spent) change(held, 0, used_by(spent)) end,
}
